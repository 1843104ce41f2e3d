"""The store: codec on real KV, reading and writing a shard, load against recompute, file growth.

Figures are CPU time of the calling thread (``time.thread_time``), so that a busy machine changes
them less; MB are 10**6 bytes of uncompressed KV ("logical"). Real KV comes from one prefill of
text by the default model; bfloat16 and float16 are that KV converted.

``bare`` is what no store can beat: zstd on the exponent plane and the merge of planes into a
preallocated array, without checksums, database, token comparison or strides.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from benchmarks.common import Requirement, finish, parse_options, table
from rakv_cluster.chunking.keys import prefix_key
from rakv_cluster.clock import SystemClock
from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.kv.codec import Codec, EncodedRecord, decode, encode, parse_head
from rakv_cluster.kv.layout import KvDtype, KvLayout, bits
from rakv_cluster.kv.record import ChunkRecord
from rakv_cluster.model.fetch import fetch_model
from rakv_cluster.model.loader import LoadedModel, load_model
from rakv_cluster.model.step import Span, Step
from rakv_cluster.store.base import LoadItem
from rakv_cluster.store.eviction import Lru
from rakv_cluster.store.folder import DATA_FILE
from rakv_cluster.store.lmdb_shard import LmdbStore, ShardSettings, ShardWriter
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.store.tiered import TieredStore

CHUNK_TOKENS = 256
NAMESPACE = bytes(32)
DTYPES: tuple[KvDtype, ...] = ("float32", "bfloat16", "float16")
GROWTH_BUDGET = 192 << 20


@dataclass(frozen=True, slots=True)
class Prefill:
    """Real KV of a text, and what computing it took."""

    layout: KvLayout
    token_ids: tuple[int, ...]
    kv: torch.Tensor
    cpu_s_per_token: float
    wall_s_per_token: float


def prefill(model: LoadedModel, tokens: int) -> Prefill:
    """Run a text through the model in steps of one chunk."""
    text = Path(tempfile.__file__).read_text() + Path(statistics.__file__).read_text()
    ids = model.tokenizer(text)["input_ids"][:tokens]
    layout = model.runner.layout
    buffer = KvBuffer(torch.zeros(layout.shape(tokens), dtype=layout.torch_dtype))
    forward(model, buffer, ids[:CHUNK_TOKENS], 0)
    wall, cpu = time.perf_counter(), time.process_time()
    for start in range(0, tokens, CHUNK_TOKENS):
        forward(model, buffer, ids[start : start + CHUNK_TOKENS], start)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Prefill(layout, tuple(ids), buffer.data, cpu / tokens, wall / tokens)


def forward(model: LoadedModel, buffer: KvBuffer, ids: Sequence[int], start: int) -> None:
    """One step over consecutive tokens of one sequence."""
    stop = start + len(ids)
    span = Span(buffer, 0, len(ids), start, stop - 1)
    positions = torch.arange(start, stop)
    model.runner.forward(Step(torch.tensor(ids), positions, (span,), torch.tensor([len(ids) - 1])))
    buffer.length = stop


def records_of(real: Prefill, dtype: KvDtype) -> list[ChunkRecord]:
    """The prefill cut into chunks, in a dtype."""
    layout = replace(real.layout, dtype=dtype)
    kv = real.kv.to(layout.torch_dtype)
    records = []
    parent = bytes(32)
    for start in range(0, len(real.token_ids), CHUNK_TOKENS):
        ids = real.token_ids[start : start + CHUNK_TOKENS]
        parent = prefix_key(NAMESPACE, parent, ids)
        chunk = bits(kv[:, :, :, start : start + len(ids)].contiguous())
        cost_ms = real.wall_s_per_token * len(ids) * 1e3
        records.append(
            ChunkRecord(parent, NAMESPACE, ids, start, layout, chunk, cost_ms, "bench", 0.0)
        )
    return records


def cpu_s(work: Callable[[], object], rounds: int) -> float:
    """Median CPU seconds of this thread for one call."""
    work()
    durations = []
    for _ in range(rounds):
        started = time.thread_time()
        work()
        durations.append(time.thread_time() - started)
    return statistics.median(durations)


def bare_decoder(record: ChunkRecord) -> Callable[[], None]:
    """Decompress and merge the planes of a chunk, and nothing else."""
    width = record.layout.itemsize
    layers = []
    for layer in record.kv:
        octets = layer.view(np.uint8).reshape(*layer.shape, width)
        top = zstandard.ZstdCompressor(level=1).compress(octets[..., width - 1].tobytes())
        if width == 2:
            low = [(octets[..., 0].copy(), 0)]
        else:
            low = [(octets[..., 2].copy(), 16), (layer.astype(np.uint16), 0)]
        layers.append((top, low))
    out = np.empty_like(record.kv)
    decompressor = zstandard.ZstdDecompressor()
    shift = 8 * (width - 1)

    def run() -> None:
        for target, (top, low) in zip(out, layers, strict=True):
            plane = np.frombuffer(decompressor.decompress(top), np.uint8).reshape(target.shape)
            np.left_shift(plane, shift, out=target, dtype=target.dtype)
            for part, offset in low:
                shifted = np.left_shift(part, offset, dtype=target.dtype) if offset else part
                np.bitwise_or(target, shifted, out=target)

    run()
    if not (out == record.kv).all():
        raise RuntimeError("the yardstick does not decode what it encoded")
    return run


@contextmanager
def shard(budget_bytes: int, **options: Any) -> Iterator[tuple[Path, ShardWriter]]:
    """A shard in a scratch folder on the local disk."""
    with tempfile.TemporaryDirectory() as folder:
        writer = ShardWriter(folder, ShardSettings(budget_bytes), SystemClock(), **options)
        try:
            yield Path(folder), writer
        finally:
            writer.close()


def measure_dtype(real: Prefill, dtype: KvDtype, rounds: int) -> dict[str, float]:
    """Ratio and speeds of one dtype: codec alone, bare yardstick, and through a shard."""
    records = records_of(real, dtype)
    logical = sum(record.kv.nbytes for record in records)
    encoded = [encode(record) for record in records]
    heads = [parse_head(one.head) for one in encoded]
    out = np.zeros(records[0].layout.shape(CHUNK_TOKENS * 3), records[0].kv.dtype)
    target = out[:, :, :, 100 : 100 + CHUNK_TOKENS]
    bare = [bare_decoder(record) for record in records]

    def decode_all() -> None:
        for head, one in zip(heads, encoded, strict=True):
            decode(head, one.body, target[:, :, :, : len(head.token_ids)])

    with shard(8 * logical) as (_, writer):
        store = LmdbStore(writer)
        store.put(records)
        items = [
            LoadItem(r.key, r.token_ids, r.layout, target[:, :, :, : len(r.token_ids)])
            for r in records
        ]

        def load_all() -> None:
            if not all(loaded.ok for loaded in store.load(items)):
                raise RuntimeError("a record that was just stored is missing")

        load_s, bare_s = alternating(load_all, lambda: [run() for run in bare], rounds)
    mb = logical / 1e6
    return {
        "ratio": logical / sum(one.nbytes for one in encoded),
        "encode_mb_s": mb / cpu_s(lambda: [encode(record) for record in records], rounds),
        "decode_mb_s": mb / cpu_s(decode_all, rounds),
        "bare_mb_s": mb / bare_s,
        "load_mb_s": mb / load_s,
        "load_to_bare": bare_s / load_s,
        "load_ms_per_chunk": load_s / len(records) * 1e3,
        "recompute_to_load": real.cpu_s_per_token * len(real.token_ids) / load_s,
    }


def alternating(
    one: Callable[[], object], other: Callable[[], object], rounds: int
) -> tuple[float, float]:
    """Median CPU seconds of two jobs that take turns, so that both see the same machine."""
    pairs = [(cpu_s(one, 1), cpu_s(other, 1)) for _ in range(rounds)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def measure_write(real: Prefill, rounds: int) -> dict[str, float]:
    """What writing costs: the engine's thread (a put into RAM), and all threads together."""
    records = records_of(real, real.layout.dtype)
    prefill_s = real.cpu_s_per_token * len(real.token_ids)
    engine_s, all_s = [], []
    for _ in range(rounds):
        with shard(64 << 20) as (_, writer):
            store = TieredStore(MemoryStore(512 << 20, SystemClock()), LmdbStore(writer))
            process, thread = time.process_time(), time.thread_time()
            store.put(records)
            engine_s.append(time.thread_time() - thread)
            store.flush(timeout_s=60.0)
            all_s.append(time.process_time() - process)
            store.close()
    return {
        "engine_thread_share": statistics.median(engine_s) / prefill_s,
        "all_threads_share": statistics.median(all_s) / prefill_s,
        "prefill_cpu_s": prefill_s,
    }


def random_record(draw: np.random.Generator, number: int) -> EncodedRecord:
    """150-450 kB of incompressible KV under a key of its own."""
    layout = KvLayout(30, 3, 64, "bfloat16")
    tokens = int(draw.integers(7, 20))
    kv = draw.integers(0, 1 << 16, layout.shape(tokens), dtype=np.uint16)
    key = prefix_key(NAMESPACE, bytes(32), [number])
    ids = tuple(range(tokens))
    record = ChunkRecord(key, NAMESPACE, ids, 0, layout, kv, 1.0, "bench", 0.0)
    return encode(record, Codec.RAW)


def measure_growth(rounds: int, seed: int, *, random_eviction: bool) -> dict[str, float]:
    """File size over many rounds of one eviction and one insert, 80% of the budget in use.

    Random eviction is the hard case: what leaves lies anywhere in the file.
    """
    draw = np.random.default_rng(seed)
    live: list[bytes] = []
    refused = 0
    with shard(GROWTH_BUDGET, policy=Lru) as (_, writer):
        path = writer.generation.path / DATA_FILE
        goal = int(GROWTH_BUDGET * (0.8 if random_eviction else 1.0))
        inserted = number = 0
        while inserted < rounds:
            record = random_record(draw, number)
            number += 1
            full = writer.stats().stored_bytes + record.nbytes > goal
            if random_eviction and full:
                index = int(draw.integers(len(live)))
                live[index], live[-1] = live[-1], live[index]
                writer.delete([live.pop()])
            result = writer.commit([record])
            refused += result.refused
            live += result.stored
            inserted += full
        stats = writer.stats()
        return {
            "rounds": inserted,
            "live_to_budget": stats.stored_bytes / GROWTH_BUDGET,
            "file_to_budget": path.stat().st_size / GROWTH_BUDGET,
            "refused": refused,
            "write_retries": stats.counters["disk_write_retries"],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    options, _ = parse_options(__doc__ or "", argv)
    rounds = 3 if options.short else 9
    # One thread: waiting threads of a parallel prefill would count as CPU time of the prefill.
    model = load_model(str(fetch_model("smollm2", cache_folder())), threads=1)
    real = prefill(model, 512 if options.short else 1024)
    by_dtype = {dtype: measure_dtype(real, dtype, rounds) for dtype in DTYPES}
    columns = list(by_dtype["float32"])
    print(table([[d, *(by_dtype[d][c] for c in columns)] for d in DTYPES], ["dtype", *columns]))
    writing = measure_write(real, rounds)
    print(table([list(writing.values())], list(writing)))
    growth_rounds = 500 if options.short else 5000
    growth = {
        "random": measure_growth(growth_rounds, options.seed, random_eviction=True),
        "by policy": measure_growth(growth_rounds, options.seed, random_eviction=False),
    }
    print(table([[k, *v.values()] for k, v in growth.items()], ["eviction", *growth["random"]]))
    results = {"dtypes": by_dtype, "writing": writing, "growth": growth}
    return finish(options, results, requirements(results))


def requirements(results: dict[str, Any]) -> list[Requirement]:
    """What issue 4 asks for."""
    dtypes, writing, growth = results["dtypes"], results["writing"], results["growth"]
    wanted = [
        Requirement(f"{d} load to bare decode", dtypes[d]["load_to_bare"], ">=", 0.55)
        for d in DTYPES
    ]
    return [
        *wanted,
        Requirement("bfloat16 ratio", dtypes["bfloat16"]["ratio"], ">=", 1.42),
        Requirement("float32 ratio", dtypes["float32"]["ratio"], ">=", 1.16),
        Requirement("engine thread share", writing["engine_thread_share"], "<=", 0.01),
        Requirement("all threads share", writing["all_threads_share"], "<=", 0.08),
        *(
            Requirement(f"file to budget, {name}", figures["file_to_budget"], "<=", 1.15)
            for name, figures in growth.items()
        ),
    ]


def cache_folder() -> Path:
    """Where fetched models live."""
    return Path(os.environ.get("RAKV_CACHE_DIR", "~/.cache/rakv")).expanduser()


if __name__ == "__main__":
    sys.exit(main())
