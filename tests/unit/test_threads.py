"""Computing aside leaves no thread, and so no OpenMP team, behind."""

from __future__ import annotations

import threading

import pytest

from rakv_cluster.model.threads import aside


def test_the_result_comes_from_a_thread_that_has_ended() -> None:
    thread = aside(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_errors_come_out() -> None:
    def fail() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        aside(fail)
