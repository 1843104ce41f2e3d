"""``rakv model make-draft``: a draft model out of the target's own layers.

Every n-th layer is kept, with embeddings, head and tokenizer as they are, so that the vocabulary
is the target's. Left at that, it rarely agrees with the target; distillation trains the kept
layers for some minutes to predict the target's distribution on given texts (Hinton et al.,
"Distilling the knowledge in a neural network", 2015).
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from rakv_cluster.errors import ConfigError, UnsupportedModel
from rakv_cluster.model.loader import load_tokenizer, local_folder
from rakv_cluster.model.quiet import no_progress_bars

REPORT_FILE = "rakv-draft.json"
ARMS = (1, 2, 4, 8)

_LEARNING_RATE = 5e-4
_TRAIN_TOKENS = 192
_OUTPUT_TOKENS = 48
_TEXT_BYTES = 1 << 25
_PROMPTS = (
    "Explain in a few sentences how a bicycle stays upright.",
    "Write a Python function that reverses a list.",
    "What are three things to see in Paris?",
    "Write a short story about a lighthouse keeper.",
)


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What was made, and how often it agrees with the target on the target's greedy output.

    ``agreement`` is the share of tokens that both choose behind the same context: the chance that
    a first draft is accepted. ``tokens_per_step`` by number of drafts counts the target's own
    token too. ``parameters_share`` is of the target's weights that a step reads.
    """

    kept_layers: tuple[int, ...]
    target_layers: int
    parameters_share: float
    training_steps: int
    measured_tokens: int
    agreement: float
    tokens_per_step: dict[int, float]


@dataclass(frozen=True, slots=True)
class Distillation:
    """How long to train, and on what: every ``*.txt``, ``*.md``, ``*.rst`` and ``*.py`` below
    ``texts``."""

    minutes: float
    texts: Path


def ignore_note(_text: str) -> None:
    """A listener that does nothing."""


def make_draft(
    source: str,
    folder: Path,
    *,
    every: int,
    distillation: Distillation | None = None,
    seed: int = 0,
    note: Callable[[str], None] = ignore_note,
    clock_s: Callable[[], float] = time.monotonic,
) -> DraftReport:
    """Write a draft model of the target at ``source`` to ``folder``, which appears by one rename.

    Layers 0, ``every``, 2 ``every``, ... are kept, and the last one. Raises :class:`ConfigError`
    for a folder that exists, a useless ``every``, texts that are not there, and
    :class:`UnsupportedModel` if the layers are not where they are in other models.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already", field="folder")
    if every < 2:
        raise ConfigError("every must be 2 or more: 1 keeps the whole model", field="every")
    origin = local_folder(source)
    tokenizer = load_tokenizer(str(origin))
    target, draft = _load(origin), _load(origin)
    kept = keep_layers(draft, every)
    note(f"kept layers {', '.join(map(str, kept))}")
    steps = 0
    if distillation is not None:
        blocks = _blocks(tokenizer, distillation.texts)
        until_s = clock_s() + distillation.minutes * 60
        steps = _distill(
            target, draft, blocks, until=lambda: clock_s() >= until_s, seed=seed, note=note
        )
    prompts = [_prompt_ids(tokenizer, text) for text in _PROMPTS]
    agrees = _agreement(target, draft, prompts)
    tokens = max(sum(map(len, agrees)), 1)
    report = DraftReport(
        kept_layers=kept,
        target_layers=target.config.get_text_config().num_hidden_layers,
        parameters_share=_parameters(draft) / _parameters(target),
        training_steps=steps,
        measured_tokens=tokens,
        agreement=sum(map(sum, agrees)) / tokens,
        tokens_per_step={
            drafts: tokens / max(sum(steps_taken(each, drafts) for each in agrees), 1)
            for drafts in ARMS
        },
    )
    _save(draft, tokenizer, report, folder)
    return report


def known_agreement(folder: Path, otherwise: float) -> float:
    """What a draft model's report says; ``otherwise`` for a model that has none."""
    try:
        return float(json.loads((folder / REPORT_FILE).read_text())["agreement"])
    except (OSError, ValueError, KeyError, TypeError):
        return otherwise


def keep_layers(model: PreTrainedModel, every: int) -> tuple[int, ...]:
    """Drop all layers but every ``every``-th and the last; returns those kept.

    Raises :class:`UnsupportedModel` for a model without a list of decoder layers.
    """
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedModel("this architecture has no list of layers to choose from")
    count = len(layers)
    kept = tuple(sorted({*range(0, count, every), count - 1}))
    decoder.layers = nn.ModuleList(layers[index] for index in kept)
    for index, layer in enumerate(decoder.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    config = model.config.get_text_config()
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in kept]
    return kept


def accepted_runs(agrees: Sequence[bool]) -> list[int]:
    """At each position, how many drafts in a row would be accepted from there on."""
    runs, run = [], 0
    for right in reversed(agrees):
        run = run + 1 if right else 0
        runs.append(run)
    return runs[::-1]


def steps_taken(agrees: Sequence[bool], drafts: int) -> int:
    """Target steps for these tokens when ``drafts`` are always taken."""
    runs, at, steps = accepted_runs(agrees), 0, 0
    while at < len(runs):
        at += 1 + min(drafts, runs[at])
        steps += 1
    return steps


def _load(folder: Path) -> PreTrainedModel:
    try:
        with no_progress_bars():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32
            )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot load the model in {folder}: {error}", field="model") from error
    return model.eval()


def _parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _prompt_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
    )
    return list(encoded["input_ids"])


def _texts(folder: Path) -> Iterator[str]:
    taken = 0
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".txt", ".md", ".rst", ".py") and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            taken += len(text)
            yield text
            if taken > _TEXT_BYTES:
                return


def _blocks(tokenizer: PreTrainedTokenizerFast, folder: Path) -> list[torch.Tensor]:
    """Training texts as ids, in pieces of equal length."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder", field="texts")
    blocks: list[torch.Tensor] = []
    for text in _texts(folder):
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        pieces = len(ids) // _TRAIN_TOKENS
        blocks += ids[: pieces * _TRAIN_TOKENS].view(-1, _TRAIN_TOKENS).unbind()
    if not blocks:
        raise ConfigError(f"no text of {_TRAIN_TOKENS} tokens below {folder}", field="texts")
    return blocks


def _distill(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    blocks: Sequence[torch.Tensor],
    *,
    until: Callable[[], bool],
    seed: int,
    note: Callable[[str], None],
) -> int:
    """Train the draft's layers until ``until()``; returns the number of steps."""
    draft.get_input_embeddings().requires_grad_(False)
    draft.get_output_embeddings().requires_grad_(False)
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=_LEARNING_RATE, weight_decay=0.0)
    chance, steps = random.Random(seed), 0
    while not until():
        ids = chance.choice(blocks)[None]
        with torch.no_grad():
            wanted = target(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        said = draft(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        loss = functional.kl_div(said[0], wanted[0], reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        torch.autograd.backward([loss])
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        steps += 1
        if steps % 20 == 0:
            note(f"step {steps}: divergence {float(loss.detach()):.3f} nat a token")
    return steps


@torch.inference_mode()
def _agreement(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: Sequence[Sequence[int]]
) -> list[list[bool]]:
    """Token by token of the target's greedy answers, whether the draft model says the same."""
    agrees: list[list[bool]] = []
    for prompt in prompts:
        text = target.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=_OUTPUT_TOKENS,
            do_sample=False,
        )
        guesses = draft(input_ids=text, use_cache=False).logits[0].argmax(-1)
        right = guesses[len(prompt) - 1 : -1] == text[0, len(prompt) :]
        agrees.append(right.tolist())
    return agrees


def _save(
    draft: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, report: DraftReport, folder: Path
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with no_progress_bars():
            draft.save_pretrained(work, safe_serialization=True)
        tokenizer.save_pretrained(work)
        (work / REPORT_FILE).write_text(json.dumps(asdict(report), indent=2) + "\n")
        work.chmod(0o755)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
