"""What benchmarks.soak and benchmarks.peers call right, wrong, refused and equal."""

from __future__ import annotations

import math

import pytest

from benchmarks.peers import Bench, _repeated
from benchmarks.peers_adapters import Absent, OpenAiServer, Transformers, TransformersPrefix
from benchmarks.soak import Case, Tally, _growth, catalogue
from rakv_cluster.client import Document
from rakv_cluster.errors import DeadlineExceeded, Overloaded, RequestRefused, Unavailable
from rakv_cluster.model.loader import load_tokenizer
from rakv_cluster.serving.prompting import PromptRenderer
from rakv_cluster.testing.tiny_models import save_tiny_model, tiny_llama

CASE = Case("q", (), {"max_tokens": 3}, "abc", 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return str(save_tiny_model(folder, tiny_llama(seed=3, layers=2)))


@pytest.mark.parametrize(
    ("text", "tokens", "right"),
    [("abc", 3, True), ("abc", -1, True), ("abcabc", 3, False), ("ab", 3, False),
     ("abc", 4, False)],
)  # fmt: skip
def test_an_answer_is_right_only_if_no_token_is_lost_or_doubled(
    text: str, tokens: int, right: bool
) -> None:
    tally = Tally()
    tally.answered("http", CASE, text, tokens)
    assert (tally.right["http"], len(tally.wrong)) == ((1, 0) if right else (0, 1))


@pytest.mark.parametrize(
    ("error", "refused"),
    [(Overloaded("full", retry_after_s=1.0), True),
     (Unavailable("no replica", retry_after_s=1.0), True),
     (Unavailable("no connection"), False),
     (RequestRefused("poison"), False), (DeadlineExceeded("late"), False)],
)  # fmt: skip
def test_only_refusals_for_load_are_no_failure(error: Exception, refused: bool) -> None:
    tally = Tally()
    tally.raised("http", error)
    assert (tally.refused["http"], len(tally.failed)) == ((1, 0) if refused else (0, 1))


def test_growth_compares_late_memory_with_early() -> None:
    flat = [(float(i), 100, 200) for i in range(40)]
    grows = [(float(i), 100 + i, 200) for i in range(40)]
    assert _growth(flat, 1) == 1.0
    assert _growth(grows, 1) > 1.1


def test_the_soaks_catalogue_is_seeded_and_has_both_kinds(model: str) -> None:
    first, again = (catalogue(model, 5, count=3) for _ in range(2))
    assert [case.text for case in first] == [case.text for case in again]
    assert {case.fields["temperature"] > 0 for case in first} == {False, True}
    assert all(case.documents for case in first)


@pytest.fixture(scope="module")
def bench(model: str) -> Bench:
    tokenizer = load_tokenizer(model)
    renderer = PromptRenderer(tokenizer)
    plain = Transformers(model, renderer.token_bytes.text)
    prefix = TransformersPrefix(plain, renderer.token_bytes.text)
    return Bench(renderer, tokenizer.decode, [plain, prefix])


def test_a_prefix_cache_answers_as_the_plain_model_does(bench: Bench) -> None:
    documents = [Document("Alpha line.\n" * 6, "a"), Document("Beta line.\n" * 6, "b")]
    for question in ("one?", "two?"):
        bench.line("cold", bench.prompt(documents, question), 12)
    bench.line("reordered", bench.prompt(documents[::-1], "two?"), 12)
    bench.restart()

    assert [m.agreement for m in bench.measured] == [1.0] * 6
    assert all(m.kl < 1e-4 or math.isnan(m.kl) for m in bench.measured)
    first, second = bench.measured[:2]
    assert {first.peer, second.peer} == {"transformers", "transformers + prefix cache"}


def test_a_server_that_does_not_answer_is_absent_with_a_reason() -> None:
    with pytest.raises(Absent, match=r"no answer from http://127\.0\.0\.1:9"):
        OpenAiServer("http://127.0.0.1:9", "m")


def test_repeated_output_is_told_apart() -> None:
    assert _repeated("a b c d e f g h " * 5) > 0.7
    assert _repeated(" ".join(map(str, range(40)))) == 0.0
