"""Measured costs of computing and loading."""

from __future__ import annotations

from rakv_cluster.reuse.costs import Costs


def test_a_prompt_that_seemed_to_take_no_time_teaches_nothing() -> None:
    costs = Costs(step_tokens=16)

    costs.observe_prefill(0, 8, 0.0)
    costs.observe_prefill(0, 8, 4.0)

    assert costs.view(0.0).prefill_rate_ms(8, 0) == 0.5
