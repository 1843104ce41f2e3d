"""Documents, rows, the window, the output files and the command."""

from __future__ import annotations

import asyncio
import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from click.testing import Result
from fastapi import FastAPI
from pypdf import PdfWriter
from typer.testing import CliRunner

from rakv_cluster.batch.documents import load_documents
from rakv_cluster.batch.html_text import html_to_text
from rakv_cluster.batch.journal import Journal, RowResult
from rakv_cluster.batch.output import write_results
from rakv_cluster.batch.ray_data import AskService
from rakv_cluster.batch.rows import Job, Row, read_rows
from rakv_cluster.batch.runner import run_rows
from rakv_cluster.cli.main import app
from rakv_cluster.client import Answer
from rakv_cluster.client.retries import NO_RETRIES
from rakv_cluster.config import Settings
from rakv_cluster.errors import ConfigError, InvalidRequest, RakvError, Unavailable
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.http_server import http_server
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_app

DOCUMENTS = {"a.txt": "Text of a. " * 60, "b.txt": "Text of b. " * 60}


def answer(text: str = "yes") -> Answer:
    details = {"cached_tokens": 3}
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": details}
    return Answer(text, "stop", 0.1, 0.2, usage, {})


# --- documents


def test_a_folder_becomes_documents(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "z.md").write_text("# Title")
    (tmp_path / "sub" / "code.py").write_text("print('é')")
    (tmp_path / "page.HTML").write_text("<p>Hello <b>you</b></p>")
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfbom")

    texts = load_documents(tmp_path).texts

    assert texts == {
        "bom.txt": "bom", "page.HTML": "Hello you", "sub/code.py": "print('é')", "z.md": "# Title",
    }  # fmt: skip
    assert list(texts) == sorted(texts)


def pdf(length: bytes) -> bytes:
    """A page whose contents say that they have this length."""
    objects = (
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /Contents 4 0 R /Resources << /Font << >> >> >>",
        b"<< /Length " + length + b" >>\nstream\nBT ET\nendstream",
    )
    written, entries = b"%PDF-1.4\n", b"0000000000 65535 f \n"
    for number, content in enumerate(objects, start=1):
        entries += b"%010d 00000 n \n" % len(written)
        written += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"xref\n0 %d\n%strailer << /Size 5 /Root 1 0 R >>\n" % (len(objects) + 1, entries)
    return written + table + b"startxref\n%d\n%%%%EOF\n" % len(written)


def test_what_holds_no_text_is_skipped_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "ok.txt").write_text("ok")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "zeros").write_bytes(b"a\0b")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "broken.pdf").write_text("no pdf")
    (tmp_path / "damaged.pdf").write_bytes(pdf(b"(no number)"))
    with (tmp_path / "empty.pdf").open("wb") as file:
        writer = PdfWriter()
        writer.add_blank_page(72, 72)
        writer.write(file)

    found = load_documents(tmp_path)

    assert list(found.texts) == ["ok.txt"]
    assert {name: reason.split(":")[0] for name, reason in found.skipped.items()} == {
        "image.png": "not UTF-8",
        "zeros": "binary",
        "blank.txt": "no text",
        "empty.pdf": "no text",
        "broken.pdf": "not a PDF that can be read",
        "damaged.pdf": "not a PDF that can be read",
    }


def test_a_file_whose_name_is_no_text_is_skipped_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "ok.txt").write_text("ok")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("text")

    found = load_documents(tmp_path)

    assert (list(found.texts), found.skipped) == (
        ["ok.txt"],
        {"caf\\xe9.txt": "its name is not UTF-8"},
    )


def test_links_out_of_the_folder_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "in.txt").write_text("in")
    (folder / ".hidden").write_text("hidden")
    os.symlink(tmp_path / "secret.txt", folder / "out.txt")
    os.symlink(folder / "in.txt", folder / "same.txt")

    assert list(load_documents(folder).texts) == ["in.txt", "same.txt"]


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ConfigError):
            load_documents(folder)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<head><title>t</title></head><body>x</body>", "x"),
        ("<head><title>t</title><body>x", "x"),
        ("<!doctype html><title>t</title><p>x", "x"),
        ("a<script>b</script>c<style>d</style>", "ac"),
        ("<h1>A</h1><p>one\n  two</p><ul><li>x<li>y</ul>", "A\n\none two\n\nx\ny"),
        ("<pre>a\n  b</pre>", "a\n  b"),
        ("1 &lt; 2 &amp; 3&eacute;", "1 < 2 & 3é"),
        ("</script></pre></b>text", "text"),
        ("<p>unclosed <b>bold", "unclosed bold"),
    ],
)
def test_html_gives_what_a_reader_sees(page: str, text: str) -> None:
    assert html_to_text(page) == text


# --- rows


def rows_of(tmp_path: Path, text: str, name: str = "p.jsonl", template: str = "$prompt") -> Any:
    path = tmp_path / name
    path.write_text(text)
    return read_rows(path, DOCUMENTS, template)


def test_a_prompt_per_line_is_asked_about_every_document(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "One?\n\n  Two?  \n", "p.txt", "$document: $prompt")

    assert rows == (
        Row("1/a.txt", "a.txt: One?", ("a.txt",)),
        Row("1/b.txt", "b.txt: One?", ("b.txt",)),
        Row("3/a.txt", "a.txt: Two?", ("a.txt",)),
        Row("3/b.txt", "b.txt: Two?", ("b.txt",)),
    )


def test_a_line_of_json_names_its_documents_in_order(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        '{"prompt": "q", "id": "x", "documents": ["b.txt", "a.txt"]}\n'
        '{"prompt": "r", "documents": []}',
    )

    assert rows == (Row("x", "q", ("b.txt", "a.txt")), Row("2", "r", ()))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no prompt"),
        ("{", "line 1: not JSON"),
        ("[]", "line 1: an object"),
        ('{"prompt": "a"}\n{"promt": "a"}', "line 2: an object"),
        ('{"prompt": 5}', "line 1: prompt must"),
        ('{"prompt": " "}', "line 1: prompt must"),
        ('{"prompt": "a"}\n{"prompt": "\\ud83d"}', "line 2: .*Unicode"),
        ('{"prompt": "a", "id": 5}', "line 1: id must"),
        ('{"prompt": "a", "documents": "a.txt"}', "line 1: documents must"),
        ('{"prompt": "a", "documents": ["../a.txt"]}', "no document '../a.txt'"),
        ('{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}', "the id 'x"),
    ],
)
def test_a_wrong_line_is_named(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        rows_of(tmp_path, text)


@pytest.mark.parametrize("template", ["$promt", "${", "$ 5"])
def test_a_wrong_template_is_refused(template: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\$prompt"):
        rows_of(tmp_path, "q", "p.txt", template)


def test_the_digest_covers_what_results_depend_on() -> None:
    row = Row("1", "q", ("a.txt",))
    base = Job((row,), DOCUMENTS, "s", {"seed": 0})

    others = [
        Job((Row("1", "r", ("a.txt",)),), DOCUMENTS, "s", {"seed": 0}),
        Job((row,), DOCUMENTS | {"a.txt": "changed"}, "s", {"seed": 0}),
        Job((row,), DOCUMENTS, "t", {"seed": 0}),
        Job((row,), DOCUMENTS, "s", {"seed": 1}),
        Job((row, row), DOCUMENTS, "s", {"seed": 0}),
    ]

    assert base.digest == Job((row,), dict(DOCUMENTS), "s", {"seed": 0}).digest
    assert len({base.digest, *(job.digest for job in others)}) == 6


def test_rows_are_planned_document_by_document(tmp_path: Path) -> None:
    job = Job(rows_of(tmp_path, "One?\nTwo?", "p.txt"), DOCUMENTS, "", {})

    planned = job.plan()

    assert planned.order == (0, 2, 1, 3)
    assert planned.reused == len(DOCUMENTS["a.txt"]) + len(DOCUMENTS["b.txt"])
    assert planned.reused_as_given == 0


# --- the window


async def test_at_most_the_window_runs_at_once_and_every_row_is_journalled(tmp_path: Path) -> None:
    running, most, enough = 0, 0, asyncio.Event()

    async def ask(index: int) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            enough.set()
        await asyncio.wait_for(enough.wait(), 10)
        running -= 1
        return answer(str(index))

    with Journal(tmp_path / "j", "job") as journal:
        await run_rows(range(20), ask, journal, window=3)
        assert [r.text for r in journal.results(20)] == [str(i) for i in range(20)]
    assert most == 3


async def test_a_rows_own_error_is_kept_and_the_rest_goes_on(tmp_path: Path) -> None:
    async def ask(index: int) -> Answer:
        if index == 1:
            raise InvalidRequest("too long", field="prompt")
        return answer()

    with Journal(tmp_path / "j", "job") as journal:
        await run_rows(range(3), ask, journal, window=2)
        assert journal.failed == {1}
        assert (journal.result(1).error_code, journal.result(1).error) == (
            "invalid_request_error", "too long",
        )  # fmt: skip


@pytest.mark.parametrize("raised", [Unavailable("gone"), RuntimeError("a bug")])
async def test_what_is_not_the_rows_fault_ends_the_run_and_costs_no_row(
    raised: Exception, tmp_path: Path
) -> None:
    cancelled: list[int] = []

    async def ask(index: int) -> Answer:
        if index == 2:
            raise raised
        try:
            return await asyncio.wait_for(asyncio.Event().wait(), 60) and answer()
        except asyncio.CancelledError:
            cancelled.append(index)
            raise

    with Journal(tmp_path / "j", "job") as journal:
        with pytest.raises(type(raised)):
            await run_rows(range(9), ask, journal, window=3)
        assert len(journal) == 0
    assert cancelled == [0, 1]


def test_memory_does_not_grow_with_the_answers(tmp_path: Path) -> None:
    text = "x" * 100_000
    with Journal(tmp_path / "j", "job") as journal:
        tracemalloc.start()
        for index in range(50):
            journal.add(RowResult(index, text=text))
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert sum(len(result.text) for result in journal.results(50)) == 50 * len(text)
    assert held_bytes < 5 * len(text)


# --- output


def test_both_formats_hold_the_rows_in_order(tmp_path: Path) -> None:
    rows = tuple(Row(str(i), f"q{i}", ("a.txt",)) for i in range(3))
    job = Job(rows, DOCUMENTS, "", {})
    with Journal(tmp_path / "j", "job") as journal:
        for index in (2, 0, 1):
            journal.add(RowResult(index, text=f"Grüße {index}", cached_tokens=index))
        for out in (tmp_path / "o.jsonl", tmp_path / "o.parquet"):
            write_results(job, journal, out)

    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    table = pyarrow.parquet.read_table(tmp_path / "o.parquet").to_pylist()
    written = [(tmp_path / f"o.{form}.stats.jsonl").read_text() for form in ("jsonl", "parquet")]
    stats = [json.loads(line) for line in written[0].splitlines()]

    assert lines == table
    assert written[0] == written[1]
    assert [line["text"] for line in lines] == ["Grüße 0", "Grüße 1", "Grüße 2"]
    assert [line["cached_tokens"] for line in stats] == [0, 1, 2]
    assert not list(tmp_path.glob(".*"))


# --- the command


@pytest.fixture
def url() -> Iterator[str]:
    def respond(prompt: str) -> str:
        if "impossible" in prompt:
            raise RakvError("the engine failed")
        return "An answer."

    async def build() -> FastAPI:
        return scripted_app(ScriptedBackend(respond), Settings(), ManualClock())

    with http_server(build) as url:
        yield url


def folder_of_documents(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in DOCUMENTS.items():
        (folder / name).write_text(text)
    return folder


def batch(tmp_path: Path, *more: str) -> Result:
    arguments = ["--docs", str(tmp_path / "docs"), "--prompts", str(tmp_path / "p.txt")]
    return CliRunner().invoke(
        app, ["batch", "run", *arguments, "--out", str(tmp_path / "o.jsonl"), *more]
    )


def test_the_command_answers_every_row_and_reuses(url: str, tmp_path: Path) -> None:
    folder_of_documents(tmp_path)
    (tmp_path / "p.txt").write_text("One?\nTwo?\nThree?")

    done = batch(tmp_path, "--url", url, "--window", "1")

    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [
        "1/a.txt", "1/b.txt", "2/a.txt", "2/b.txt", "3/a.txt", "3/b.txt",
    ]  # fmt: skip
    assert {line["text"] for line in lines} == {"An answer."}
    stats = [json.loads(x) for x in (tmp_path / "o.jsonl.stats.jsonl").read_text().splitlines()]
    assert [s["cached_tokens"] > 500 for s in stats] == [False, False, True, True, True, True]
    assert sorted(p.name for p in tmp_path.glob("o.*")) == ["o.jsonl", "o.jsonl.stats.jsonl"]
    again = batch(tmp_path, "--url", url, "--resume")
    assert (again.exit_code, "nothing to resume" in again.output) == (2, True)


def test_a_dry_run_shows_the_plan_and_asks_nothing(tmp_path: Path) -> None:
    folder_of_documents(tmp_path)
    (tmp_path / "p.txt").write_text("One?\nTwo?")

    done = batch(tmp_path, "--dry-run", "--url", "http://127.0.0.1:1")

    assert done.exit_code == 0, done.output
    assert "4 rows over 2 documents" in done.output
    assert "50% in the planned order" in done.output
    assert not list(tmp_path.glob("o.*"))


def test_rows_with_errors_give_exit_code_1_and_can_be_asked_again(url: str, tmp_path: Path) -> None:
    folder_of_documents(tmp_path)
    (tmp_path / "p.txt").write_text("One?\nThe impossible?")

    done = batch(tmp_path, "--url", url)

    assert done.exit_code == 1
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [bool(line["error_code"]) for line in lines] == [False, False, True, True]
    assert lines[2]["error"] == "the engine failed"
    written = (tmp_path / "o.jsonl").read_bytes()
    assert batch(tmp_path, "--url", url, "--resume").exit_code == 1
    assert (tmp_path / "o.jsonl").read_bytes() == written


def test_rows_with_errors_are_asked_again_once_the_service_is_right(tmp_path: Path) -> None:
    folder_of_documents(tmp_path)
    (tmp_path / "p.txt").write_text("One?\nThe impossible?")
    failing = True

    def respond(prompt: str) -> str:
        if failing and "impossible" in prompt:
            raise RakvError("the engine failed")
        return "An answer."

    backend = ScriptedBackend(respond)

    async def build() -> FastAPI:
        return scripted_app(backend, Settings(), ManualClock())

    with http_server(build) as url:
        assert batch(tmp_path, "--url", url).exit_code == 1
        failing = False
        again = batch(tmp_path, "--url", url, "--resume", "--retry-errors")

    assert again.exit_code == 0, again.output
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == ["An answer."] * 4
    assert len(backend.requests) == 6, "only rows with errors are asked again"
    assert sorted(p.name for p in tmp_path.glob("o.*")) == ["o.jsonl", "o.jsonl.stats.jsonl"]


def test_what_is_there_is_never_overwritten(url: str, tmp_path: Path) -> None:
    folder_of_documents(tmp_path)
    (tmp_path / "p.txt").write_text("One?")
    (tmp_path / "o.jsonl").write_text("mine")

    assert batch(tmp_path, "--url", url).exit_code == 2
    assert (tmp_path / "o.jsonl").read_text() == "mine"


@pytest.mark.parametrize("out", ["o.csv", "gone/o.jsonl"])
def test_an_output_that_cannot_be_written_is_refused_at_once(out: str, tmp_path: Path) -> None:
    folder_of_documents(tmp_path)
    (tmp_path / "p.txt").write_text("One?")

    assert batch(tmp_path, "--out", str(tmp_path / out)).exit_code == 2


def test_a_refused_key_stops_the_job_with_exit_code_3(tmp_path: Path) -> None:
    folder_of_documents(tmp_path)
    (tmp_path / "p.txt").write_text("One?")
    settings = Settings.model_validate({"api_keys": '{"keys": []}'})

    async def build() -> FastAPI:
        return scripted_app(ScriptedBackend(), settings, ManualClock())

    with http_server(build) as url:
        stopped = batch(tmp_path, "--url", url)

    assert stopped.exit_code == 3
    assert "no API key" in stopped.output
    assert not (tmp_path / "o.jsonl").exists()
    assert (tmp_path / "o.jsonl.journal").exists()


def test_a_model_that_is_not_there_is_a_job_that_cannot_be_run(tmp_path: Path) -> None:
    folder_of_documents(tmp_path)
    (tmp_path / "p.txt").write_text("One?")

    arguments = ["--docs", str(tmp_path / "docs"), "--prompts", str(tmp_path / "p.txt")]
    refused = CliRunner().invoke(
        app,
        ["batch", "run", *arguments, "--out", str(tmp_path / "o.jsonl"), "--in-process"],
        env={"RAKV_MODEL": str(tmp_path / "nowhere")},
    )

    assert refused.exit_code == 2, refused.output
    assert "nowhere" in refused.output


def test_a_job_file_holds_the_options_and_the_command_line_wins(url: str, tmp_path: Path) -> None:
    folder_of_documents(tmp_path)
    (tmp_path / "p.txt").write_text("One?\nTwo?")
    job = tmp_path / "JOB.yaml"
    job.write_text(
        "docs: docs\nprompts: p.txt\nout: from_job.jsonl\ntemplate: 'Say: $prompt'\n"
        f"window: 2\nmax-tokens: 3\nurl: {url}\n"
    )

    plain = CliRunner().invoke(app, ["batch", "run", str(job)])
    out = tmp_path / "given.jsonl"
    given = CliRunner().invoke(app, ["batch", "run", str(job), "--out", str(out), "--window", "1"])

    assert plain.exit_code == given.exit_code == 0, plain.output + given.output
    written = (tmp_path / "from_job.jsonl").read_text()
    rows = [json.loads(line) for line in written.splitlines()]
    assert [row["question"] for row in rows] == ["Say: One?"] * 2 + ["Say: Two?"] * 2
    assert {row["output_tokens"] for row in rows} == {3}
    assert out.read_text() == written


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prompt: p.txt", "unknown option 'prompt'; did you mean 'prompts'?"),
        ("api_key: secret", "unknown option 'api_key'"),
        ("- a list", "must be a mapping"),
        ("{", "cannot be read"),
        ("prompts: p.txt\nout: o.jsonl\nwindow: many", "window"),
    ],
)
def test_a_job_file_with_a_mistake_is_refused(content: str, words: str, tmp_path: Path) -> None:
    job = tmp_path / "JOB.yaml"
    job.write_text(content)

    done = CliRunner().invoke(app, ["batch", "run", str(job)], env={"COLUMNS": "200"})

    assert done.exit_code == 2
    assert words in done.output


def test_the_ray_data_class_keeps_rows_and_their_errors(url: str) -> None:
    ask = AskService(url, options={"max_tokens": 3})

    answered = ask(
        {
            "question": np.array(["One?", "The impossible?"], dtype=object),
            "document": np.array(["A text.", None], dtype=object),
            "label": np.array([7, 8]),
        }
    )

    assert list(answered["text"]) == ["An ", ""]
    assert list(answered["error"]) == ["", "the engine failed"]
    assert list(answered["label"]) == [7, 8]
    assert answered["prompt_tokens"][0] > answered["prompt_tokens"][1] == 0


def test_the_ray_data_class_fails_a_batch_without_a_service() -> None:
    ask = AskService("http://127.0.0.1:1", retries=NO_RETRIES)

    with pytest.raises(Unavailable):
        ask({"question": np.array(["One?"], dtype=object)})
