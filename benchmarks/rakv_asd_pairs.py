"""Pairs of benchmarks/rakv_asd.py: a target and what drafts for it."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.speculation_arms import SpeculationRig
from rakv_cluster.model.four_bit import four_bit_runner
from rakv_cluster.model.loader import load_model
from rakv_cluster.model.make_draft import Distillation, known_agreement, make_draft
from rakv_cluster.speculation.draft_model import UNKNOWN_AGREEMENT, DraftModel, check_vocabulary
from rakv_cluster.speculation.draft_rounds import ModelDrafter
from rakv_cluster.speculation.self_draft import SelfDraft

SELF = "self"
_DRAFT_KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and what drafts: ``draft`` is the number N of which every N-th layer is kept,
    ``distilled`` by some minutes of training or not, or :data:`SELF` for the target's own weights
    in four bits."""

    model: str
    draft: str
    distilled: float

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.model}:{self.draft}"


def model_and_draft(text: str) -> list[tuple[str, str]]:
    """From the command line, ``MODEL:DRAFT,...``; raises ``argparse.ArgumentTypeError``."""
    found = []
    for name in text.split(","):
        model, _, draft = name.rpartition(":")
        if not model or not (draft == SELF or (draft.isdecimal() and int(draft) > 0)):
            raise argparse.ArgumentTypeError(f"a pair is MODEL:N or MODEL:{SELF}, not {name!r}")
        found.append((model, draft))
    return found


def new_drafter(
    pair: Pair, rig: SpeculationRig, *, source: str, cache_dir: Path, texts: Path, threads: int
) -> Callable[[], ModelDrafter]:
    """Makes calibrated drafters for the rig's model, all on one copy of the draft's weights."""
    if pair.draft == SELF:
        four_bits = four_bit_runner(rig.loaded.runner)

        def drafting_for_itself() -> ModelDrafter:
            made = SelfDraft(four_bits, rig.clock)
            made.calibrate()
            return made

        return drafting_for_itself
    folder = _draft_folder(pair, source, cache_dir, texts)
    draft = load_model(str(folder), threads=threads)
    check_vocabulary(rig.loaded.tokenizer, draft.tokenizer)

    def by_draft_model() -> ModelDrafter:
        made = DraftModel(
            draft.runner,
            rig.clock,
            kv_budget_bytes=_DRAFT_KV_BYTES,
            vocab_size=rig.loaded.runner.vocab_size,
            agreement=known_agreement(folder, UNKNOWN_AGREEMENT),
        )
        made.calibrate()
        return made

    return by_draft_model


def _draft_folder(pair: Pair, source: str, cache_dir: Path, texts: Path) -> Path:
    """The pair's draft model, made if it is not there; what it was trained on is in its name."""
    recipe = f"{source} {pair.draft} {pair.distilled} {texts if pair.distilled else ''}"
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:8]
    folder = cache_dir / "drafts" / f"{Path(source).name}-{pair.draft}-{digest}"
    if not folder.exists():
        training = Distillation(pair.distilled, texts) if pair.distilled else None
        make_draft(source, folder, every=int(pair.draft), distillation=training, note=_note)
    return folder


def _note(text: str) -> None:
    print(f"... {text}", flush=True)
