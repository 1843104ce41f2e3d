"""A replica's speculation: step costs outlive it, a draft model serves it or is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from rakv_cluster.chunking.boundaries import ChunkLimits, CutTable
from rakv_cluster.chunking.prompt import chunk_prompt
from rakv_cluster.clock import SystemClock
from rakv_cluster.config import Settings, load_settings
from rakv_cluster.engine.request import EngineRequest, RequestStats
from rakv_cluster.errors import ConfigError
from rakv_cluster.model.loader import LoadedModel, load_model
from rakv_cluster.serving.replica import Replica
from rakv_cluster.speculation.cost_files import (
    CostIdentity,
    costs_path,
    load_costs,
    machine_name,
)
from rakv_cluster.speculation.cost_model import CostBuckets, CostTable
from rakv_cluster.speculation.speculator import SpeculationMode
from rakv_cluster.store.memory import MemoryStore
from rakv_cluster.testing.tiny_models import save_tiny_model, tiny_gemma3, tiny_llama
from rakv_cluster.types import SamplingParams

PROMPT = [(7 * index) % 250 + 3 for index in range(60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return load_model(str(save_tiny_model(folder, tiny_llama())), threads=1)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings({"cache_dir": tmp_path, "store": "memory"}, environ={})


@pytest.fixture
def replica(model: LoadedModel, settings: Settings) -> Callable[..., Replica]:
    def start(draft: LoadedModel | None = None) -> Replica:
        clock = SystemClock()
        return Replica(model, MemoryStore(1 << 22, clock), settings, clock, draft=draft)

    return start


def ask(subject: Replica, model: LoadedModel, mode: SpeculationMode) -> tuple[list[int], object]:
    """Tokens and stats of one greedy request."""
    cuts = CutTable.from_tokenizer(model.tokenizer)
    prompt = chunk_prompt(bytes(32), [PROMPT], cuts, ChunkLimits())
    request = EngineRequest(
        f"asked-{mode}", prompt, 40, SamplingParams(temperature=0.0), speculation=mode
    )

    async def run() -> tuple[list[int], object]:
        events = [event async for event in subject.generate(request)]
        return [token for event in events for token in event.token_ids], events[-1].stats

    return asyncio.run(run())


def kept_costs(model: LoadedModel, settings: Settings) -> CostTable:
    card = model.card
    identity = CostIdentity(machine_name(), card.digest.hex(), card.numeric_class)
    return load_costs(costs_path(settings.cache_path, identity), identity, CostBuckets())


def test_what_was_learned_of_costs_is_there_after_a_restart(
    replica: Callable[..., Replica], model: LoadedModel, settings: Settings
) -> None:
    first = replica()
    measured = kept_costs(model, settings).to_json()
    ask(first, model, "auto")
    first.close()

    learned = kept_costs(model, settings).to_json()
    assert learned != measured
    second = replica()
    try:
        stats = asyncio.run(second.stats())
    finally:
        second.close()
    (figures,) = stats.values()
    costs = CostTable.from_json(learned, CostBuckets()).step_costs(batch=1, context_tokens=512)
    assert figures["speculation_plain_step_seconds"] == pytest.approx(costs.at(1) / 1e3)


def test_a_draft_model_serves(replica: Callable[..., Replica], model: LoadedModel) -> None:
    subject = replica(model)  # the target itself
    try:
        plain, _ = ask(subject, model, "off")
        drafted, stats = ask(subject, model, "4")
        (figures,) = asyncio.run(subject.stats()).values()
    finally:
        subject.close()

    assert isinstance(stats, RequestStats)
    assert drafted == plain
    assert stats.model_drafts > 0
    steps = figures["speculation_steps_total"]
    assert isinstance(steps, dict)
    assert steps["4"] > 0


def test_a_draft_model_with_other_tokens_is_refused(
    replica: Callable[..., Replica], tmp_path: Path
) -> None:
    other = load_model(str(save_tiny_model(tmp_path / "other", tiny_llama())), threads=1)
    other.tokenizer.add_tokens(["surplus"])

    with pytest.raises(ConfigError) as refused:
        replica(other)

    assert refused.value.field == "draft_model"


def test_a_model_drafts_for_itself_where_that_is_set(
    model: LoadedModel, settings: Settings
) -> None:
    wanted = settings.model_copy(update={"self_draft": True})
    clock = SystemClock()
    subject = Replica(model, MemoryStore(1 << 22, clock), wanted, clock)
    try:
        plain, _ = ask(subject, model, "off")
        drafted, stats = ask(subject, model, "4")
    finally:
        subject.close()

    assert isinstance(stats, RequestStats)
    assert drafted == plain
    assert stats.model_drafts > 0


def test_only_models_of_the_fused_decoder_draft_for_themselves(
    settings: Settings, tmp_path: Path
) -> None:
    gemma = load_model(str(save_tiny_model(tmp_path / "gemma", tiny_gemma3())), threads=1)
    wanted = settings.model_copy(update={"self_draft": True})
    clock = SystemClock()

    with pytest.raises(ConfigError, match="fused decoder") as refused:
        Replica(gemma, MemoryStore(1 << 22, clock), wanted, clock)

    assert refused.value.field == "self_draft"
