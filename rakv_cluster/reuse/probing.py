"""The question probe: what is not reused runs once over the unrepaired rest, to see what of it the
question attends to. Those positions are repaired, and what is not reused runs again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rakv_cluster.kv.buffer import Positions, no_positions
from rakv_cluster.model.watch import UNWATCHED, AttentionWatch
from rakv_cluster.reuse.blending import positions_to_compute
from rakv_cluster.reuse.selection import (
    Floats,
    Reused,
    Selector,
    nothing,
    probed_selector,
    unknown,
)
from rakv_cluster.types import ChunkedPrompt

_QUESTION_TOKENS = 64
"""At most so many of the last tokens are watched: what stands behind the documents is a question,
or ends in one."""


def question_start(prompt: ChunkedPrompt) -> int:
    """Where what stands behind a prompt's documents begins, or its last tokens if that is long."""
    return max(prompt.segment_start, len(prompt.token_ids) - _QUESTION_TOKENS)


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """Which layers of a model are watched (none: it is never probed), and who selects then.

    A request that forces its fraction is probed if that takes at most ``most_share`` of the time
    of what follows.
    """

    layers: tuple[int, ...] = ()
    selector: Selector = probed_selector
    most_share: float = 0.25


NOT_PROBED = ProbeSettings()
"""The question never runs first."""


def probe_settings(layers: int) -> ProbeSettings:
    """For a model of so many layers: every other one of the upper two thirds."""
    return ProbeSettings(tuple(range(layers // 3, layers, 2)))


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """One prompt's: ``count`` of ``reused`` will be repaired, as ``selector`` says once ``watch``
    has seen the first pass. The prompt is exact below ``covered`` and ends at ``total``."""

    watch: AttentionWatch
    selector: Selector
    reused: Reused
    count: int
    covered: int
    total: int

    @classmethod
    def of(
        cls, settings: ProbeSettings, reused: Reused, count: int, *, covered: int, total: int
    ) -> Probe:
        """For a prompt whose last token is not reused."""
        first = max(int(reused.positions[-1]) + 1, total - _QUESTION_TOKENS)
        watch = AttentionWatch(settings.layers, first)
        return cls(watch, settings.selector, reused, count, covered, total)

    @property
    def pending(self) -> bool:
        """Whether there is anything to run."""
        return bool(self.watch.layers)

    def first_pass(self) -> Positions:
        """What runs before the selection: all that is not reused."""
        return positions_to_compute(
            self.reused.positions, no_positions(), covered=self.covered, total=self.total
        )

    def attended(self) -> Reused:
        """The reused positions with what the watch has seen of them."""
        seen: Floats = self.watch.figures(int(self.reused.positions[-1]) + 1).numpy()
        return replace(self.reused, attention=seen[self.reused.positions])

    def select(self) -> Positions:
        """What to repair, by what the watch has seen."""
        return self.selector(self.attended(), self.count)


_NOTHING_REUSED = Reused(no_positions(), no_positions(), *[unknown(0)] * 4)
NO_PROBE = Probe(UNWATCHED, nothing, _NOTHING_REUSED, 0, 0, 0)
"""Nothing to run."""
