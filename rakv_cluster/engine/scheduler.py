"""What the engine does next, as pure functions of a small view of its state.

Order of service:
- every sequence that needs one token gets it in every step (running streams; prompts whose KV is
  there already);
- prompt tokens share what is left of the step. Beside running streams that is little enough to
  keep the step within ``gap_factor`` of a step without them; at least half of it goes to the
  oldest prompt, so none starves, the rest to the tenant served least and, within it, to the
  shortest remainder, so a short prompt does not wait behind a long one;
- a sequence that must compute alone (a replay) has every other step;
- what is in the background has steps, small ones, while nobody else has anything to compute; its
  memory goes to others who need it, and it is admitted last;
- at most ``max_running`` sequences take part in a step; streams keep their places;
- requests are admitted one by one, preempted ones first, then by tenant served least, then in
  order of arrival. The next in line is never overtaken: one that waits for memory gets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rakv_cluster.reuse.costs import CostView


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence with tokens to compute: ``remaining`` of them from ``position`` on.

    ``arrival`` orders requests and identifies them; ``streaming`` says that it has emitted tokens.
    One that is ``alone`` takes one token at a time in steps without others. One in the
    ``background`` gives way to all others.
    """

    arrival: int
    tenant: str
    position: int
    remaining: int
    streaming: bool
    alone: bool = False
    background: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """``tokens`` of a step for the sequence that arrived as number ``arrival``."""

    arrival: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StepLimits:
    """See :class:`rakv_cluster.engine.settings.EngineSettings`."""

    max_step_tokens: int
    min_prefill_tokens: int
    gap_factor: float
    background_step_tokens: int


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits for admission."""

    arrival: int
    tenant: str
    preempted: bool
    background: bool = False


def take_seats(candidates: Sequence[Candidate], seats: int) -> list[Candidate]:
    """Who may take part in a step: streams before prompts, then the oldest. Those in the background
    only if there are no others.

    There can be more than ``seats`` when requests come back that waited for another replica: they
    kept nobody out meanwhile.
    """
    urgent = [each for each in candidates if not each.background] or candidates
    return sorted(urgent, key=lambda each: (not each.streaming, each.arrival))[:seats]


def plan_step(
    candidates: Sequence[Candidate],
    served: Mapping[str, float],
    limits: StepLimits,
    costs: CostView,
    *,
    lone_turn: bool = False,
) -> tuple[Share, ...]:
    """How many tokens of which sequences the next forward computes; one-token shares first.

    ``lone_turn``: the oldest of those that compute alone has the step, if there is one.
    """
    together = [each for each in candidates if not each.alone]
    alone = [each.arrival for each in candidates if each.alone]
    if alone and (lone_turn or not together):
        return (Share(min(alone), 1),)
    singles = [each for each in together if each.remaining == 1]
    prompts = sorted(
        (each for each in together if each.remaining > 1), key=lambda each: each.arrival
    )
    shares = [Share(each.arrival, 1) for each in singles]
    if not prompts:
        return tuple(shares)
    budget = min(
        limits.max_step_tokens - len(singles),
        _prefill_budget(singles, prompts[0], limits, costs),
    )
    granted = _divide(prompts, budget, served)
    shares += [
        Share(each.arrival, granted[each.arrival]) for each in prompts if granted[each.arrival]
    ]
    return tuple(shares)


def next_admission(waiters: Sequence[Waiter], served: Mapping[str, float]) -> int:
    """Index of the request to admit next; ``waiters`` must not be empty."""
    return min(
        range(len(waiters)),
        key=lambda index: (
            waiters[index].background,
            not waiters[index].preempted,
            0.0 if waiters[index].preempted else served.get(waiters[index].tenant, 0.0),
            waiters[index].arrival,
        ),
    )


def choose_victim(arrivals: Sequence[int], needy: int, background: Sequence[int] = ()) -> int:
    """Who gives up its KV memory when sequence ``needy`` must grow and none is free.

    The youngest of those in the ``background``, if there is one. Else the youngest of all, which
    may be ``needy`` itself; so the oldest always finishes, and preemption cannot go round in
    circles.
    """
    return max(background or [*arrivals, needy])


class TenantShares:
    """Tokens computed per tenant since it last became busy; what fairness is measured by.

    A tenant that becomes busy starts level with the least served busy one: idling earns no
    credit. Idle tenants are forgotten, so the map is bounded by the open requests.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._open: dict[str, int] = {}

    @property
    def served(self) -> Mapping[str, float]:
        """Tokens by tenant."""
        return self._served

    def enter(self, tenant: str) -> None:
        """A request of ``tenant`` was submitted."""
        if tenant not in self._open:
            self._served[tenant] = min(self._served.values(), default=0.0)
        self._open[tenant] = self._open.get(tenant, 0) + 1

    def charge(self, tenant: str, tokens: int) -> None:
        """``tokens`` were computed for ``tenant``."""
        self._served[tenant] += tokens

    def leave(self, tenant: str) -> None:
        """A request of ``tenant`` ended."""
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant], self._served[tenant]


def _prefill_budget(
    singles: Sequence[Candidate], oldest: Candidate, limits: StepLimits, costs: CostView
) -> int:
    """Prompt tokens that keep the running streams' gap within the factor; all if none runs.

    The first tokens ride along while the step waits for memory, so what a few cost says little of
    many: the budget doubles as long as twice as many are measured to fit, and what fits beyond that
    costs what these did, each, up to twice as many.
    """
    if oldest.background:
        return limits.background_step_tokens
    streams = sum(each.streaming for each in singles)
    if not streams:
        return limits.max_step_tokens
    decode_ms = costs.decode_ms(len(singles))
    room_ms = (limits.gap_factor - 1) * decode_ms
    tokens = limits.min_prefill_tokens
    while tokens < limits.max_step_tokens:
        wider = 2 * tokens
        if wider * costs.prefill_rate_ms(wider, oldest.position) > room_ms:
            break
        tokens = wider
    fits = int(room_ms / costs.prefill_rate_ms(tokens, oldest.position))
    return max(limits.min_prefill_tokens, min(fits, 2 * tokens - 1))


def _divide(
    prompts: Sequence[Candidate], budget: int, served: Mapping[str, float]
) -> dict[int, int]:
    """Split ``budget`` among ``prompts`` (oldest first): half to the oldest, the rest by need."""
    oldest = prompts[0]
    granted = {each.arrival: 0 for each in prompts}
    granted[oldest.arrival] = min(oldest.remaining, (budget + 1) // 2)
    left = budget - granted[oldest.arrival]
    by_need = sorted(
        prompts, key=lambda each: (served.get(each.tenant, 0.0), each.remaining, each.arrival)
    )
    for each in by_need:
        tokens = min(each.remaining - granted[each.arrival], left)
        granted[each.arrival] += tokens
        left -= tokens
    return granted
