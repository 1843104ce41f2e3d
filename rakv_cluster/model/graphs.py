"""The fused decoder over CUDA graphs: steps of few rows are launched by the layer.

Launched one by one, the kernels of a small step keep a GPU waiting for Python. Here all that
stands between two layers' attention is recorded once per bucket of row counts and replayed:
one launch instead of a dozen. Attention runs between the recordings as before, since each sequence
has a buffer of its own that grows and moves. Steps of more rows run unrecorded.

Not executed on a GPU yet (README). What CPU tests cannot run is :class:`CudaRecorder`; the rest
they run on a recorder that keeps a graph's rules: fixed addresses, and no Python in a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.model.fused import NO_BLOCKS, Block, FusedLlamaRunner, Scratch
from rakv_cluster.model.linear import Kernel, RowChoice, RowPlan
from rakv_cluster.model.llama import LlamaWeights

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Row counts that are recorded; a step of fewer rows is padded to the next. One row has a bucket
of its own: lone one-token steps decide near-ties."""

BUCKETED_ROWS = RowPlan(tuple(RowChoice(n, n, Kernel.PLAIN) for n in BUCKETS), Kernel.PLAIN)

Work = Callable[[], None]
Recorder = Callable[[Work], Work]
"""Runs work on fixed tensors and returns what does it again. Leaves in the tensors what it likes.
Raises ``RuntimeError`` where it cannot."""


class CudaRecorder:
    """Records as CUDA graphs, which share their memory for temporaries: replays may come in any
    order, but one after another on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch

    def __call__(self, work: Work) -> Work:
        # Libraries allocate their workspaces at first use, which must not be recorded.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile: nothing of theirs is on this stream.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay


def recorder_for(device: torch.device) -> Recorder:
    """How to record on ``device``; raises :class:`UnsupportedModel` where nothing can."""
    if device.type != "cuda":
        raise UnsupportedModel(f"CUDA graphs need a GPU, not {device.type!r}")
    return CudaRecorder(device)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The fixed tensors of steps of so many rows, and the recordings over them.

    ``between[n]`` ends layer ``n - 1`` behind its attention and begins layer ``n``; ``head`` makes
    ``logits`` of ``hidden``.
    """

    hidden: torch.Tensor
    scratch: Scratch
    logits: torch.Tensor
    between: tuple[Work, ...]
    head: Work


class GraphedLlamaRunner(FusedLlamaRunner):
    """Replays steps of up to ``BUCKETS[-1]`` rows; rounds as the plain kernels do on as many rows
    as the bucket has. All buckets are recorded before it is ready."""

    def __init__(self, weights: LlamaWeights, record: Recorder) -> None:
        """Raises :class:`UnsupportedModel` where ``record`` fails."""
        super().__init__(weights, rows=BUCKETED_ROWS)
        self._block_rows = NO_BLOCKS  # a bucket's tensors serve one block at a time
        try:
            # The largest first: the smaller ones' temporaries then fit its memory.
            self._buckets = {rows: self._recorded(rows, record) for rows in reversed(BUCKETS)}
        except RuntimeError as error:
            raise UnsupportedModel(f"steps cannot be recorded: {error}") from error

    @torch.inference_mode()
    def _recorded(self, rows: int, record: Recorder) -> _Bucket:
        weights = self._weights
        hidden = weights.embedding.new_zeros(rows, weights.embedding.shape[1])
        scratch = Scratch(weights.shape, rows, weights.embedding)
        logits = hidden.new_empty(rows, self.vocab_size, dtype=torch.float32)
        return _Bucket(
            hidden,
            scratch,
            logits,
            between=tuple(
                record(partial(self._run_between, index, hidden, scratch))
                for index in range(len(weights.layers) + 1)
            ),
            head=record(partial(self._run_head, hidden, logits)),
        )

    def _run_between(self, index: int, hidden: torch.Tensor, scratch: Scratch) -> None:
        if index > 0:
            self._behind_attention(index - 1, hidden, scratch, Kernel.PLAIN)
        if index < len(self._weights.layers):
            self._before_attention(index, hidden, scratch, Kernel.PLAIN)

    def _run_head(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        logits.copy_(super()._rows_logits(hidden, Kernel.PLAIN))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        bucket = self._buckets.get(len(token_ids))
        if bucket is None:
            return super()._embed(token_ids)
        return torch.index_select(self._weights.embedding, 0, token_ids, out=bucket.hidden)

    def _block_scratch(self, rows: int) -> Scratch:
        # What an earlier step left in rows that are padding now stays: no row sees another's.
        bucket = self._buckets.get(rows)
        return super()._block_scratch(rows) if bucket is None else bucket.scratch

    def _run_layer(self, index: int, block: Block, hidden: torch.Tensor) -> None:
        bucket = self._buckets.get(len(hidden))
        if bucket is None:
            super()._run_layer(index, block, hidden)
            return
        if index == 0:
            bucket.between[0]()
        block.attend(index)
        bucket.between[index + 1]()

    def _rows_logits(self, hidden: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        bucket = self._buckets.get(len(hidden))
        if bucket is None:
            return super()._rows_logits(hidden, kernel)
        bucket.hidden.copy_(hidden)
        bucket.head()
        return bucket.logits.clone()
