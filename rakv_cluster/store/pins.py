"""Records that must not be evicted: each pin has an owner and an end, so that none can leak."""

from __future__ import annotations

from collections.abc import Iterator


class Pins:
    """Who holds which key until when (wall-clock seconds). Not thread-safe."""

    def __init__(self) -> None:
        self._until_s: dict[bytes, dict[str, float]] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def __iter__(self) -> Iterator[tuple[bytes, str, float]]:
        for key, owners in self._until_s.items():
            for owner, until_s in owners.items():
                yield key, owner, until_s

    def hold(self, key: bytes, owner: str, until_s: float) -> None:
        """Pin a key, or move the end of the owner's pin."""
        self._until_s.setdefault(key, {})[owner] = until_s

    def release(self, key: bytes, owner: str) -> bool:
        """End an owner's pin; returns whether there was one."""
        owners = self._until_s.get(key, {})
        if owners.pop(owner, None) is None:
            return False
        if not owners:
            del self._until_s[key]
        return True

    def forget(self, key: bytes) -> list[str]:
        """Drop a key that is gone, and return who held it."""
        return list(self._until_s.pop(key, {}))

    def held(self, now_s: float) -> frozenset[bytes]:
        """Keys with a pin that has not ended."""
        return frozenset(
            key for key, owners in self._until_s.items() if max(owners.values()) > now_s
        )

    def ended(self, now_s: float) -> list[tuple[bytes, str]]:
        """``(key, owner)`` of pins that are over."""
        return [(key, owner) for key, owner, until_s in self if until_s <= now_s]
