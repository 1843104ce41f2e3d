"""What the ingress remembers of cached prefixes, and how errors name documents."""

from __future__ import annotations

from rakv_cluster.serving.documents import SeenPrefixes, as_sent


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_the_oldest_keys_are_forgotten() -> None:
    seen = SeenPrefixes(lambda _: False, most_keys=3)

    seen.add([key(1), key(2), key(3)])
    seen.add([key(1), key(4)])

    assert seen.cached([key(n) for n in range(6)]) == {key(1), key(3), key(4)}


def test_keys_on_some_disk_are_cached_too() -> None:
    seen = SeenPrefixes({key(7)}.__contains__)
    seen.add([key(1)])

    assert seen.cached([key(1), key(2), key(7)]) == {key(1), key(7)}


def test_fields_are_named_as_the_client_sent_them() -> None:
    assert as_sent("documents.0.text", (2, 0, 1)) == "documents.2.text"
    assert as_sent("messages.0.content", (2, 0, 1)) == "messages.0.content"
    assert as_sent("documents", (2, 0, 1)) == "documents"
    assert as_sent(None, ()) is None
