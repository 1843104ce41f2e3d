"""Blending over HTTP: asked for, carried out, labelled; refused with the reason."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from rakv_cluster.testing import chats

ASH, BIRCH, CEDAR = (
    {"id": name, "text": f"{name} {name}. " * 40} for name in ("ash", "birch", "cedar")
)


def ask(http: httpx.Client, *documents: dict[str, str], **fields: Any) -> dict[str, Any]:
    return chats.ask(http, documents=documents, **fields)


def seen(http: httpx.Client) -> None:
    """Have two documents computed and stored."""
    chats.reusing(lambda: ask(http, ASH, BIRCH))


def test_a_blend_says_what_it_did(fresh: httpx.Client) -> None:
    seen(fresh)

    answer = ask(fresh, CEDAR, BIRCH, reuse="blend", recompute=0.25)["rakv"]

    assert answer["reuse"] == "blend"
    assert answer["exactness"] == "approximate"
    assert answer["blend"]["approximate"]
    assert answer["blend"]["repaired_fraction"] == pytest.approx(0.25, abs=0.01)
    assert answer["blend"]["expected_kl"] is None
    assert answer["tokens"]["blended"] > 0.7 * len(BIRCH["text"])
    assert answer["tokens"]["computed"] > len(CEDAR["text"])


def test_repaired_wholly_the_text_is_that_without_reuse(fresh: httpx.Client) -> None:
    seen(fresh)

    blended = ask(fresh, CEDAR, BIRCH, ASH, reuse="blend", recompute=1.0)
    plain = ask(fresh, CEDAR, BIRCH, ASH, reuse="off")

    assert blended["rakv"]["blend"]["repaired_fraction"] == 1.0
    assert blended["choices"] == plain["choices"]


def test_without_a_calibration_it_is_exact_and_says_why(fresh: httpx.Client) -> None:
    seen(fresh)

    refused = ask(fresh, BIRCH, ASH, reuse="blend", max_kl=0.5)
    plain = ask(fresh, BIRCH, ASH, reuse="off")

    assert "not calibrated" in refused["rakv"]["blend"]["refusal"]
    assert not refused["rakv"]["blend"]["approximate"]
    assert refused["choices"] == plain["choices"]


def test_exact_requests_say_nothing_is_approximate(fresh: httpx.Client) -> None:
    blend = ask(fresh, ASH)["rakv"]["blend"]

    assert blend == {
        "approximate": False, "repaired_tokens": 0, "repaired_fraction": 0.0,
        "expected_kl": None, "refusal": "", "probed": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reuse": "exact", "max_kl": 0.1}, "max_kl"),
        ({"reuse": "reorder", "recompute": 0.1}, "recompute"),
        ({"reuse": "blend", "recompute": 1.5}, "recompute"),
        ({"reuse": "blend", "max_kl": 0}, "max_kl"),
        ({"reuse": "blend", "max_kl": 0.1, "recompute": 0.1}, "recompute"),
    ],
)
def test_bad_wishes_name_the_field(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}

    response = http.post(chats.CHAT, json=body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
