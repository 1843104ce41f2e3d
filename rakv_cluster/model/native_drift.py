"""What follows a repair (:mod:`rakv_cluster.model.drift`) by a native kernel: two passes over the
tokens of a run in place of a product with all that is repaired of it."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import torch

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.drift import CLIP, PRIOR_WEIGHT, REACH_TOKENS, Between, Drift, Turns
from rakv_cluster.model.native import NativeFollowing

MOST_DIM = 256
"""Channels of a head, at most: what the kernel has registers and stack for."""


class NativeFollower:
    """See :class:`rakv_cluster.model.drift.Follower`; float32 on the CPU."""

    def __init__(
        self, library: ctypes.CDLL, drift: Drift, between: Between, buffer: KvBuffer
    ) -> None:
        self._native, self._buffer = library, buffer
        here = np.arange(between.low, between.high)
        self._turns = Turns(drift.rotation, here, torch.device("cpu"))
        row = np.full(len(here), -1, dtype=np.int64)
        row[between.repaired - between.low] = np.arange(len(between.repaired))
        follows = np.zeros(len(here), dtype=np.uint8)
        follows[between.kept - between.low] = 1
        borders = np.flatnonzero(np.diff(drift.runs[between.low : between.high])) + 1
        starts = np.concatenate([[0], borders, [len(here)]])
        before = buffer.data.index_select(3, torch.from_numpy(between.repaired))
        heads, dim = before.shape[2], before.shape[4]
        self._job = NativeFollowing(
            between.low,
            len(here),
            heads,
            dim,
            drift.rotation.frequencies.shape[1],
            len(between.repaired),
            len(starts) - 1,
            between.repaired.ctypes.data,
            starts.ctypes.data,
            row.ctypes.data,
            follows.ctypes.data,
            None,
            None,
            before.data_ptr(),
            math.exp(-1 / REACH_TOKENS),
            PRIOR_WEIGHT,
            CLIP,
            None,
            torch.get_num_threads(),
        )
        floats = library.rakv_following_space(self._job.address)
        space = torch.empty(floats * torch.get_num_threads())
        self._job.space = space.data_ptr()
        self._job.kept = (between.repaired, starts, row, follows, before, space)

    def follow(self, layer: int) -> None:
        """See :meth:`rakv_cluster.model.drift.Follower.follow`."""
        cosines, sines = self._turns.tables(layer)
        self._job.cosines, self._job.sines = cosines.data_ptr(), sines.data_ptr()
        slots = self._buffer.data[layer]
        strides = slots.stride()
        address = slots.data_ptr()
        self._native.rakv_follow(self._job.address, layer, address, strides[0], strides[1])
