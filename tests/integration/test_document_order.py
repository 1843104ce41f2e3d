"""Documents as a set, over HTTP: a cached order is found, reported, and changes no token."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import httpx

from rakv_cluster.testing import chats
from rakv_cluster.testing.chats import cached_tokens, reusing

DOCUMENTS = [{"id": name, "text": f"{name} {name}. " * 40} for name in ("ash", "birch", "cedar")]
ORDERS = list(permutations(range(3)))


def ask(http: httpx.Client, order: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    return chats.ask(http, **{"documents": [DOCUMENTS[i] for i in order]} | fields)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def used(answer: dict[str, Any], order: tuple[int, ...]) -> tuple[int, ...]:
    """The documents in the order used, as indices into ``DOCUMENTS``."""
    report = answer["rakv"]["documents"]
    assert report["ids"] == [DOCUMENTS[order[i]]["id"] for i in report["indices"]]
    return tuple(order[i] for i in report["indices"])


def test_documents_stay_as_given_unless_asked(fresh: httpx.Client) -> None:
    answer = ask(fresh, (2, 0, 1))

    assert answer["rakv"]["documents"] == {
        "order": "given", "indices": [0, 1, 2], "ids": ["cedar", "ash", "birch"],
    }  # fmt: skip


def test_a_cached_order_is_found_and_its_tokens_are_those_of_plain_decoding(
    fresh: httpx.Client,
) -> None:
    seen = (1, 2, 0)
    ask(fresh, seen)
    plain = ask(fresh, seen, reuse="off")

    reusing(lambda: ask(fresh, seen))
    for order in ORDERS:
        answer = ask(fresh, order, reuse="reorder")

        assert answer["rakv"]["documents"]["order"] == "cached"
        assert used(answer, order) == seen
        assert text_of(answer) == text_of(plain)
        assert cached_tokens(answer) > 0.9 * answer["usage"]["prompt_tokens"]


def test_an_unknown_set_converges_to_one_order(fresh: httpx.Client) -> None:
    orders = {used(ask(fresh, order, reuse="reorder"), order) for order in ORDERS}

    assert len(orders) == 1


def test_canonical_order_ignores_the_cache(fresh: httpx.Client) -> None:
    canonical = {used(ask(fresh, o, documents_order="canonical"), o) for o in ORDERS}
    (chosen,) = canonical
    other = next(order for order in ORDERS if order[0] != chosen[0])
    ask(fresh, other)

    assert used(ask(fresh, other, documents_order="canonical"), other) == chosen


def test_the_longest_of_several_cached_paths_wins(fresh: httpx.Client) -> None:
    extra = {"id": "dogwood", "text": "dogwood. " * 60}
    both = {"documents": [DOCUMENTS[2], extra, DOCUMENTS[0]]}
    ask(fresh, (0, 1))
    ask(fresh, (0, 1), **both)

    asked = [DOCUMENTS[0], DOCUMENTS[2], extra]
    report = ask(fresh, (), documents=asked, reuse="reorder")["rakv"]["documents"]

    assert report["ids"] == ["cedar", "dogwood", "ash"]


def test_an_error_names_the_document_as_it_was_sent(fresh: httpx.Client) -> None:
    documents = [*DOCUMENTS, {"id": "bad", "text": ""}]
    response = fresh.post(
        chats.CHAT,
        json={
            "messages": [{"role": "user", "content": "?"}],
            "documents": documents,
            "reuse": "reorder",
        },
    )

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "documents.3.text"
