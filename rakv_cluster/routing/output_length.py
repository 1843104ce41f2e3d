"""How long an answer will be: learned per endpoint and tenant."""

from __future__ import annotations

from collections import OrderedDict

_GAIN = 0.1
_PRIOR_TOKENS = 128.0
_CAPACITY = 4096


class OutputLengths:
    """Mean output tokens by (endpoint, tenant), an exponentially weighted mean of each.

    A pair never seen answers like its endpoint, an endpoint never seen with a prior. Bounded:
    the pair used longest ago is forgotten. Used by one thread.
    """

    def __init__(self) -> None:
        self._means: OrderedDict[tuple[str, str], float] = OrderedDict()

    def expected(self, endpoint: str, tenant: str, max_tokens: int) -> float:
        """Tokens that an answer will probably have, at most ``max_tokens``."""
        for pair in ((endpoint, tenant), (endpoint, "")):
            if pair in self._means:
                return min(self._means[pair], float(max_tokens))
        return min(_PRIOR_TOKENS, float(max_tokens))

    def observe(self, endpoint: str, tenant: str, output_tokens: int) -> None:
        """An answer had so many tokens, or so many when its client left it: what is asked for is
        the work, and that was done."""
        for pair in {(endpoint, tenant), (endpoint, "")}:
            known = self._means.get(pair, float(output_tokens))
            self._means[pair] = known + _GAIN * (output_tokens - known)
            self._means.move_to_end(pair)
        while len(self._means) > _CAPACITY:
            self._means.popitem(last=False)

    def __len__(self) -> int:
        return len(self._means)
