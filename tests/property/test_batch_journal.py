"""A journal cut at any byte gives back whole rows only, and the job ends as if nothing happened."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rakv_cluster.batch.journal import Journal, RowResult
from rakv_cluster.errors import ConfigError

TEXTS = st.text(max_size=20)
RESULTS = st.lists(
    st.builds(
        RowResult,
        index=st.integers(0, 5),
        text=TEXTS,
        error_code=st.sampled_from(["", "", "internal_error"]),
        prompt_tokens=st.integers(0, 9),
    ),
    max_size=8,
)


def written(path: Path, results: list[RowResult], job: str = "job") -> bytes:
    with Journal(path, job) as journal:
        for result in results:
            journal.add(result)
    return path.read_bytes()


def last_of_each(results: list[RowResult]) -> dict[int, RowResult]:
    return {result.index: result for result in results}


def read(path: Path, job: str = "job") -> dict[int, RowResult]:
    with Journal(path, job) as journal:
        return {index: journal.result(index) for index in range(6) if index in journal}


# Fewer examples than usual: each row costs an fsync; the test of every cut below is exhaustive.
@settings(max_examples=30)
@given(results=RESULTS, data=st.data())
def test_a_kill_at_any_byte_loses_only_what_was_not_whole(
    results: list[RowResult], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        whole = written(path, results)
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        kept = max(0, whole[:cut].count(b"\n") - 1)

        found = read(path)
        assert found == last_of_each(results[:kept])

        assert written(path, results[kept:]) == whole
        assert read(path) == last_of_each(results)


@settings(max_examples=50)
@given(results=RESULTS, data=st.data())
def test_a_damaged_byte_never_gives_another_result(
    results: list[RowResult], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        whole = bytearray(written(path, results))
        header = whole.index(b"\n") + 1
        if header == len(whole):
            return
        position = data.draw(st.integers(header, len(whole) - 1))
        whole[position] ^= data.draw(st.integers(1, 255))
        path.write_bytes(whole)

        found = read(path)

        assert all(result in results for result in found.values())


def test_every_cut_of_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    results = [RowResult(0, text="Grüße\n\u2028"), RowResult(1, error_code="e", error="x" * 30)]
    whole = written(path, results)

    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = max(0, whole[:cut].count(b"\n") - 1)
        assert written(path, results[kept:]) == whole


def test_failed_rows_are_known_and_can_be_mended(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, [RowResult(0, error_code="e"), RowResult(1)])

    with Journal(path, "job") as journal:
        assert journal.failed == {0}
        journal.add(RowResult(0, text="now"))
        assert journal.failed == frozenset()
    assert read(path)[0].text == "now"


def test_another_jobs_journal_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = written(path, [RowResult(0)])

    with pytest.raises(ConfigError, match="another job"):
        Journal(path, "other")
    assert path.read_bytes() == whole


def test_two_processes_never_share_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    code = (
        "import sys; from pathlib import Path; from rakv_cluster.batch.journal import Journal\n"
        "Journal(Path(sys.argv[1]), 'job')"
    )
    with Journal(path, "job"):
        other = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
        )

    assert other.returncode != 0
    assert "another process works on" in other.stderr
