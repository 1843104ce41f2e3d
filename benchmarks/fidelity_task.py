"""The task behind a prompt: is its answer in what an arm writes, and how likely is it?

An answer counts as right if the gold one stands in the text (at most 32 tokens), both without
case, punctuation and articles, as SQuAD's evaluation compares them.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from benchmarks.common import table
from rakv_cluster.reuse.calibrating import Interval, mean_of
from rakv_cluster.reuse.fidelity import FidelityCase, Ids, Measured

FULL, REORDER = "full recompute", "reorder"
POINTS = 0.03
"""An accuracy that is certainly no more than this below full recompute's is not inferior."""

ENOUGH = 400
"""With fewer prompts nothing is said about it: few differ at all, and resampling those that do not
proves nothing."""


@dataclass(frozen=True, slots=True)
class Task:
    """One arm on one prompt; ``logp`` is the gold answer's, per token."""

    right: bool
    logp: float


def tasks(
    case: FidelityCase,
    arms: Mapping[tuple[str, float], Measured],
    answer: Ids,
    tokenizer: PreTrainedTokenizerFast,
) -> dict[str, Task]:
    """Of full recompute, of the order that was cached, and of every arm that wrote a text."""
    gold = plain(tokenizer.decode(answer))

    def task(text: Ids, logp: float) -> Task:
        return Task(f" {gold} " in f" {plain(tokenizer.decode(text))} ", logp)

    exact_logp = next(iter(arms.values())).exact_answer_logp
    found = {
        FULL: task(case.reference, exact_logp),
        REORDER: task(case.reordered_text, case.reordered_answer_logp),
    }
    for (name, fraction), measured in arms.items():
        if measured.text:
            found[f"{name} {fraction:.0%}"] = task(measured.text, measured.answer_logp)
    return found


def plain(text: str) -> str:
    """Lower case, no punctuation, no articles, single blanks."""
    bare = "".join(each for each in text.lower() if each not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def accuracy(found: Sequence[Task]) -> Interval:
    """Share of right answers."""
    return mean_of([float(task.right) for task in found])


def difference(found: Sequence[Task], full: Sequence[Task]) -> Interval:
    """Accuracy above full recompute's on the same prompts."""
    pairs = zip(found, full, strict=True)
    return mean_of([float(mine.right) - float(theirs.right) for mine, theirs in pairs])


def verdict(above: Interval, prompts: int) -> str:
    """Whether an accuracy is within :data:`POINTS` of full recompute's, if that can be said."""
    if prompts < ENOUGH or above.low < -POINTS <= above.high:
        return "not established"
    return "within 3 points" if above.low >= -POINTS else "inferior"


def report_tasks(found: Mapping[str, Sequence[Task]]) -> dict[str, Any]:
    """Print accuracy and likelihood of every arm beside full recompute's; the same as data."""
    rows, report = [], {}
    full = found[FULL]
    for name, each in found.items():
        share, above = accuracy(each), difference(each, full)
        pairs = zip(each, full, strict=True)
        lost = mean_of([theirs.logp - mine.logp for mine, theirs in pairs])
        said = "" if name == FULL else verdict(above, len(each))
        rows.append([name, shown(share), shown(above), said, shown(lost)])
        report[name] = {
            "prompts": len(each), "accuracy": asdict(share), "above_full": asdict(above),
            "verdict": said, "answer_logp_lost": asdict(lost),
        }  # fmt: skip
    print(f"task, {len(full)} prompts with an answer (accuracy is judged from {ENOUGH} on)")
    headings = ["arm", "accuracy", "above full recompute", "non-inferior", "answer logp lost"]
    print(table(rows, headings))
    return report


def shown(interval: Interval) -> str:
    """Value and bounds."""
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
