"""Where the KV of a request's chunks is, as seen from each replica.

Three sources, all hints: the replicas' hot sets (RAM, reported once a second), predictions (a
replica that was just sent these chunks will hold them), and the directory (which nodes' disks).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rakv_cluster.routing.hot_set import HotSets, hash_rows
from rakv_cluster.routing.score import Reach

Holders = tuple[tuple[str, ...], ...]
"""Per leading chunk, the nodes that hold it on disk."""

_RAM = np.uint8(Reach.RAM)
_MAX_ROWS = 4096


@dataclass(frozen=True, slots=True)
class LocationSettings:
    """A prediction is believed for ``prediction_ttl_s`` after the work it follows from should be
    done; by then the replica has reported. At most ``max_predictions`` keys, newest kept."""

    prediction_ttl_s: float = 3.0
    max_predictions: int = 16384


class Locations:
    """Locations for a fixed list of replicas, by index. Used by one thread."""

    def __init__(self, nodes: Sequence[str], settings: LocationSettings) -> None:
        self._settings = settings
        self._nodes = np.asarray(nodes, dtype=np.str_)
        self._hot = HotSets(len(nodes))
        self._predicted: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        self._rows: dict[tuple[str, ...], bytes] = {}

    @property
    def predictions(self) -> int:
        """Number of keys with a prediction."""
        return len(self._predicted)

    def arranged(self, nodes: Sequence[str], sources: Sequence[int]) -> Locations:
        """The same for another list of replicas: each one's state is that of ``sources``, none
        where that is -1."""
        other = Locations(nodes, self._settings)
        other._hot = self._hot.arranged(sources)
        places = {source: index for index, source in enumerate(sources) if source >= 0}
        for key, (replica, until_s) in self._predicted.items():
            if replica in places:
                other._predicted[key] = (places[replica], until_s)
        return other

    def report(self, replica: int, hot: bytes) -> None:
        """A replica's hot set, as :func:`~.hot_set.encode_hot_set` made it."""
        self._hot.set(replica, hot)

    def predict(self, keys: Sequence[bytes], replica: int, done_s: float) -> None:
        """``replica`` will hold ``keys`` in RAM from ``done_s`` on, and until it reports."""
        until_s = done_s + self._settings.prediction_ttl_s
        for key in keys:
            self._predicted[key] = (replica, until_s)
            self._predicted.move_to_end(key)
        while len(self._predicted) > self._settings.max_predictions:
            self._predicted.popitem(last=False)

    def reach(self, keys: Sequence[bytes], holders: Holders, now_s: float) -> npt.NDArray[np.uint8]:
        """[R, len(keys)] of :class:`Reach`; ``holders`` may be shorter than ``keys``."""
        if not keys:
            return np.zeros((len(self._nodes), 0), dtype=np.uint8)
        # Rows are joined as bytes: a numpy call per chunk would be most of a decision's time.
        rows = [self._rows.get(nodes) or self._stored(nodes) for nodes in holders[: len(keys)]]
        rows.append(bytes((len(keys) - len(rows)) * len(self._nodes)))
        reach = np.frombuffer(bytearray().join(rows), dtype=np.uint8).reshape(len(keys), -1)
        np.copyto(reach, _RAM, where=self._hot.lookup(hash_rows(keys)))
        reach.ravel()[
            [
                chunk * len(self._nodes) + place[0]
                for chunk, key in enumerate(keys)
                if (place := self._predicted.get(key)) is not None and place[1] >= now_s
            ]
        ] = _RAM
        return reach.T

    def _stored(self, nodes: tuple[str, ...]) -> bytes:
        """[R]: a replica's own disk where its node is among ``nodes``, another's elsewhere."""
        if len(self._rows) >= _MAX_ROWS:
            self._rows.clear()
        elsewhere = Reach.REMOTE if nodes else Reach.NONE
        row = np.where(np.isin(self._nodes, nodes), np.uint8(Reach.DISK), np.uint8(elsewhere))
        self._rows[nodes] = row.tobytes()
        return self._rows[nodes]


def directory_holders(keys: Sequence[bytes], located: Mapping[bytes, tuple[str, ...]]) -> Holders:
    """Holders of the leading keys that the directory knows, up to the first it does not."""
    holders: list[tuple[str, ...]] = []
    for key in keys:
        nodes = located.get(key)
        if not nodes:
            break
        holders.append(nodes)
    return tuple(holders)
