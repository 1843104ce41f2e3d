"""What is evicted is computed again, whether a prompt fills a chunk or not."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from rakv_cluster.chunking.boundaries import CutTable
from rakv_cluster.clock import SystemClock
from rakv_cluster.cluster.admin import StoreAdmin
from rakv_cluster.config import load_settings
from rakv_cluster.model.loader import load_model
from rakv_cluster.serving.auth import ANONYMOUS
from rakv_cluster.serving.cache_api import CacheApi
from rakv_cluster.serving.openai_models import CompletionRequest, validated
from rakv_cluster.serving.prompting import PromptRenderer
from rakv_cluster.serving.replica import Replica
from rakv_cluster.serving.service import Service
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.simulated_shards import SimulatedShards
from rakv_cluster.testing.tiny_models import save_tiny_model, tiny_llama


@pytest.mark.parametrize("prompt", ["short", "A line of text.\n\n" * 40 + "and its end"])
async def test_nothing_of_an_evicted_prompt_is_reused(prompt: str, tmp_path: Path) -> None:
    model = load_model(str(save_tiny_model(tmp_path / "tiny", tiny_llama())), threads=1)
    given = {"cache_dir": tmp_path, "store": "memory", "price_loads": False}
    settings = load_settings(given, environ={})
    clock = SystemClock()
    replica = Replica(model, MemoryStore(1 << 26, clock), settings, clock)
    service = Service(
        settings=settings,
        backend=replica,
        card=model.card,
        renderer=PromptRenderer(model.tokenizer),
        cuts=CutTable.from_tokenizer(model.tokenizer),
        clock=clock,
        seeds=Random(0),
    )
    shards = SimulatedShards([], clock, np.random.default_rng(0))
    cache = CacheApi(service, ServiceMetrics(), StoreAdmin(shards, tuple, clock))
    request = validated(CompletionRequest, {"prompt": prompt, "max_tokens": 4, "ignore_eos": True})

    async def cached_tokens() -> int:
        return (await cache.warm(request, ANONYMOUS)).stats.cached_tokens

    async def evicted() -> bool:
        # Repeated: a request stores its last KV a moment after its answer.
        for _ in range(20):
            await cache.evict(request, ANONYMOUS)
            if await cached_tokens() == 0:
                return True
        return False

    try:
        assert await cached_tokens() == 0
        assert await evicted()
    finally:
        replica.close()
