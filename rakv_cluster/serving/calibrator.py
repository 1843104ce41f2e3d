"""A model's calibration, measured in idle time at first use where there is none (ADR 0105)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from rakv_cluster.errors import ConfigError, Unavailable
from rakv_cluster.model.loader import LoadedModel
from rakv_cluster.model.step import Runner
from rakv_cluster.model.threads import alone
from rakv_cluster.reuse.calibrating import measure_curves
from rakv_cluster.reuse.calibration import Calibration, load_calibration, save_calibration
from rakv_cluster.reuse.probing import probe_settings
from rakv_cluster.serving.calibration_texts import STANDARD_LIBRARY, calibration_prompts
from rakv_cluster.serving.prompting import PromptRenderer

log = logging.getLogger(__name__)

_PIECE_ROWS = 32
"""Of a forward in idle time: a request that arrives waits for one, some hundredths of a second."""

Measure = Callable[[], Iterator[Calibration]]
"""Yields what is known after each prompt; the last one counts."""


class Calibrator:
    """Knows the calibration of ``path`` and, if there is none, has it measured once asked for.

    ``prompts`` is how many ``measure`` takes; with 0 nothing is measured. Any thread may call
    :meth:`current`.
    """

    def __init__(self, path: Path, measure: Measure, *, prompts: int) -> None:
        self._path = path
        self._measure = measure
        self._prompts = prompts
        self._lock = threading.Lock()
        self._known = kept_calibration(path)
        self._begun = bool(self._known.points) or prompts == 0

    def current(self) -> Calibration:
        """What is known now: at first use of a model without calibration, why it has none yet."""
        with self._lock:
            if not self._begun:
                self._begun = True
                self._known = self._pending(0)
                threading.Thread(target=self._run, name="rakv-calibrate", daemon=True).start()
            return self._known

    def _run(self) -> None:
        try:
            with alone():
                self._run_alone()
        except Unavailable:
            log.info("the engine stopped before calibration was done")
        except Exception:  # the boundary of a thread that nobody joins
            log.exception("calibration failed; requests with max_kl are computed exactly")
            self._set(Calibration(pending="calibrating this model failed: see the replica's log"))

    def _run_alone(self) -> None:
        log.info("calibrating in idle time: %d prompts", self._prompts)
        found = Calibration()
        for found in self._measure():
            kept = kept_calibration(self._path)
            if kept.points:  # another replica, or `rakv calibrate`, was faster
                self._set(kept)
                return
            self._set(self._pending(found.prompts))
        self._set(found)
        try:
            save_calibration(found, self._path)
        except OSError:
            log.warning("the calibration cannot be kept in %s", self._path, exc_info=True)
        log.info("calibrated by %d prompts", found.prompts)

    def _pending(self, done: int) -> Calibration:
        return Calibration(
            pending=f"this model is not calibrated yet: {done} of {self._prompts} prompts are "
            "measured, more whenever the service is idle"
        )

    def _set(self, calibration: Calibration) -> None:
        with self._lock:
            self._known = calibration


def kept_calibration(path: Path) -> Calibration:
    """What is kept at ``path``; an empty one if that is nothing, or no calibration."""
    try:
        return load_calibration(path)
    except ConfigError as error:
        log.warning("going on without a calibration: %s", error)
        return Calibration()


def idle_measurement(model: LoadedModel, runner: Callable[[], Runner], prompts: int) -> Measure:
    """Measures so many prompts of the standard library's help texts on ``runner``, which is asked
    for once measuring begins."""

    def measure() -> Iterator[Calibration]:
        curves = measure_curves(
            runner(),
            model.rotation,
            calibration_prompts(PromptRenderer(model.tokenizer), count=prompts),
            model.card.eos_token_ids,
            probe=probe_settings(model.card.layout.layers),
            piece_rows=_PIECE_ROWS,
        )
        for done, found in enumerate(curves, start=1):
            yield Calibration(
                model.card.model_id, done, STANDARD_LIBRARY, found.plain, found.probed
            )

    return measure
