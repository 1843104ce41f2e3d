"""A model without calibration is measured once something asks for one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rakv_cluster.errors import Unavailable
from rakv_cluster.reuse.calibration import (
    Calibration,
    CurvePoint,
    load_calibration,
    save_calibration,
)
from rakv_cluster.serving.calibrator import Calibrator
from rakv_cluster.testing.waiting import eventually

DEADLINE_S = 20.0
POINT = CurvePoint(0.0, 0.1, 0.1, 0.1, 0.2, 0.3, 0.9, 0.9, 0.9, 0.5, 0.5, 0.5)
FOUND = Calibration("m", 2, "texts", (POINT,), (POINT,))


class Measuring:
    """Yields after each prompt, once :attr:`go` is set for it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = self.measured = 0
        self.threads = 0
        self.go = [threading.Event(), threading.Event()]
        self._error = error

    def __call__(self) -> Iterator[Calibration]:
        self.begun += 1
        self.threads = torch.get_num_threads()
        for done, go in enumerate(self.go, start=1):
            assert go.wait(DEADLINE_S)
            if self._error is not None:
                raise self._error
            self.measured = done
            yield replace(FOUND, prompts=done)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calibration" / "m.json"


def test_the_first_who_asks_starts_it_and_nobody_waits(path: Path) -> None:
    measuring = Measuring()
    calibrator = Calibrator(path, measuring, prompts=2)

    asked = [calibrator.current().choose(0.3).refusal for _ in range(3)]
    assert all("not calibrated yet: 0 of 2" in refusal for refusal in asked)
    measuring.go[0].set()
    eventually(lambda: "1 of 2" in calibrator.current().pending, "one prompt is done")
    assert not path.exists()
    measuring.go[1].set()
    eventually(lambda: calibrator.current() == FOUND, "all are")

    assert calibrator.current().choose(0.3).fraction == 0.0
    eventually(path.exists, "it is kept")
    assert load_calibration(path) == FOUND
    assert measuring.begun == 1
    assert measuring.threads == 1


def test_what_is_kept_is_used(path: Path) -> None:
    save_calibration(FOUND, path)
    measuring = Measuring()

    assert Calibrator(path, measuring, prompts=2).current() == FOUND
    assert measuring.begun == 0


def test_another_replica_may_be_faster(path: Path) -> None:
    measuring = Measuring()
    calibrator = Calibrator(path, measuring, prompts=2)
    calibrator.current()
    others = replace(FOUND, texts="another's")

    save_calibration(others, path)
    for go in measuring.go:
        go.set()

    eventually(lambda: calibrator.current() == others, "the other's is used")
    assert measuring.measured == 1
    assert load_calibration(path) == others


def test_without_prompts_it_is_never_measured(path: Path) -> None:
    measuring = Measuring()

    refusal = Calibrator(path, measuring, prompts=0).current().choose(0.3).refusal

    assert "run `rakv calibrate`" in refusal
    assert measuring.begun == 0


def test_a_failure_is_said(path: Path) -> None:
    measuring = Measuring(ValueError("as the test asked"))
    calibrator = Calibrator(path, measuring, prompts=2)
    calibrator.current()

    measuring.go[0].set()

    eventually(lambda: "failed" in calibrator.current().pending, "it is known")
    assert "see the replica's log" in calibrator.current().choose(0.3).refusal
    assert measuring.begun == 1
    assert not path.exists()


def test_an_engine_that_stops_is_no_failure(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rakv_cluster.serving.calibrator")
    measuring = Measuring(Unavailable("the engine is stopping"))
    calibrator = Calibrator(path, measuring, prompts=2)
    calibrator.current()

    measuring.go[0].set()

    eventually(lambda: "stopped before" in caplog.text, "the thread has ended")
    assert "0 of 2" in calibrator.current().pending
