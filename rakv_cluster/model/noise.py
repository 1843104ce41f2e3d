"""Counter-based randomness: the noise of a token is a function of its place, not of history.

Generator: splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014). A row's key mixes (seed, choice index, position); the stream that starts at the key
gives token ``i`` its ``i``-th output. Any subset of tokens can therefore be drawn, in any batch,
on any device, with the same result.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def row_key(seed: int, choice_index: int, position: int) -> int:
    """The 64-bit key of one row, as a signed integer that fits a torch int64."""
    state = 0
    for word in (seed, choice_index, position):
        state = _mix((state + (word & _MASK) + _GOLDEN) & _MASK)
    return _signed(state)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64, for pairs of row key and token id (int64, broadcast).

    -log(-log u) with u uniform on the centres of 2**52 cells of (0, 1): always finite, in
    [-3.6, 36.7].
    """
    bits = _mix_tensor(keys + (token_ids + 1) * _signed(_GOLDEN))
    uniform = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return uniform.log_().neg_().log_().neg_()


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _mix_tensor(value: torch.Tensor) -> torch.Tensor:
    """:func:`_mix` on int64, whose multiplication wraps just as unsigned does."""
    value = (value ^ _shift_right(value, 30)) * _signed(_MIX_1)
    value = (value ^ _shift_right(value, 27)) * _signed(_MIX_2)
    return value ^ _shift_right(value, 31)


def _shift_right(value: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift: torch has no uint64 arithmetic, and int64's shift copies the sign."""
    return (value >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
