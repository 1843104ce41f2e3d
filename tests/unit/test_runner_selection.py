"""Which runner a model gets: fused where it equals the generic forward, generic where not."""

from __future__ import annotations

import pytest
import torch

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.model.fused import FusedLlamaRunner
from rakv_cluster.model.linear import Kernel, Linear
from rakv_cluster.model.numerics import Numerics, observe_numerics
from rakv_cluster.model.row_attention import Masked
from rakv_cluster.model.runner import TransformersRunner
from rakv_cluster.model.selection import ChosenRunner, KernelOptions, choose_runner
from rakv_cluster.model.step import Step
from rakv_cluster.testing.tiny_models import tiny_gemma3, tiny_llama


def choose(**options: object) -> ChosenRunner:
    return choose_runner(
        tiny_llama(), context_tokens=512, options=KernelOptions(**options)  # type: ignore[arg-type]  # test options
    )  # fmt: skip


def packed_bytes(runner: FusedLlamaRunner) -> int:
    return sum(w.nbytes for w in runner.weights.linears if w.packed is not None)


def test_a_llama_gets_the_fused_decoder_and_its_bits_do_not_depend_on_packing() -> None:
    chosen = choose()
    assert isinstance(chosen.runner, FusedLlamaRunner)
    assert chosen.kernels == "fused[uniform]"
    assert chosen.error < 1e-4
    assert chosen.numerics.bitwise
    assert chosen.numerics.near_tie_eps == 0


def test_fast_numerics_differ_by_rounding_and_say_by_how_much() -> None:
    chosen = choose(numerics="fast", packed_budget_bytes=0)
    assert isinstance(chosen.runner, FusedLlamaRunner)
    assert packed_bytes(chosen.runner) == 0
    assert not chosen.numerics.bitwise
    assert 0 < chosen.numerics.near_tie_eps < 1e-3


def test_over_the_budget_nothing_is_packed() -> None:
    chosen = choose(packed_budget_bytes=1000)
    assert isinstance(chosen.runner, FusedLlamaRunner)
    assert packed_bytes(chosen.runner) == 0
    assert "packed" not in chosen.kernels


def test_off_keeps_the_generic_forward() -> None:
    chosen = choose(fused="off")
    assert isinstance(chosen.runner, TransformersRunner)
    assert chosen.kernels == "transformers"
    assert not chosen.numerics.bitwise


def test_other_architectures_run_generic_unless_fused_is_demanded() -> None:
    chosen = choose_runner(tiny_gemma3(), context_tokens=512, options=KernelOptions())
    assert isinstance(chosen.runner, TransformersRunner)
    with pytest.raises(UnsupportedModel, match="Gemma3"):
        choose_runner(tiny_gemma3(), context_tokens=512, options=KernelOptions(fused="on"))


def test_a_wrong_attention_falls_back_to_the_generic_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def zeros(self: Masked, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()

    monkeypatch.setattr(Masked, "attend", zeros)
    chosen = choose()
    assert isinstance(chosen.runner, TransformersRunner)
    assert {"uniform", "plain"} <= set(chosen.refused)
    with pytest.raises(UnsupportedModel, match="uniform"):
        choose(fused="on")


def test_a_wrong_packed_product_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def negated(self: Linear) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(-self.weight, 16)

    monkeypatch.setattr(Linear, "pack", negated)
    chosen = choose()
    assert isinstance(chosen.runner, FusedLlamaRunner)
    assert Kernel.PACKED.value not in chosen.kernels
    assert chosen.error < 1e-4


def test_a_missing_operator_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Linear) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(Linear, "pack", missing)
    chosen = choose()
    assert isinstance(chosen.runner, FusedLlamaRunner)
    assert packed_bytes(chosen.runner) == 0


def test_uniform_is_only_claimed_where_the_bits_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """On kernels that round by the number of rows of a step. (Which ones do, and where, is the
    machine's affair: on some of them no way to pack rows differs in a bit.)"""
    forward = FusedLlamaRunner.forward

    def rounding(self: FusedLlamaRunner, step: Step) -> torch.Tensor:
        return forward(self, step) + 1e-7 * len(step.token_ids)

    monkeypatch.setattr(FusedLlamaRunner, "forward", rounding)
    chosen = choose()
    assert chosen.kernels != "fused[uniform]"
    assert not chosen.numerics.bitwise


@pytest.mark.parametrize("numerics", ["uniform", "fast"])
def test_half_precision_is_checked_against_its_own_reference(numerics: str) -> None:
    options = KernelOptions(fused="on", numerics=numerics)  # type: ignore[arg-type]  # test options
    model = tiny_llama().to(torch.bfloat16)
    chosen = choose_runner(model, context_tokens=512, options=options)
    assert chosen.runner.layout.dtype == "bfloat16"
    assert chosen.numerics.spread < 1


def test_numerics_of_a_short_context_are_observed_too() -> None:
    chosen = choose_runner(tiny_llama(), context_tokens=60, options=KernelOptions())
    assert chosen.runner.context_tokens == 60
    assert observe_numerics(chosen.runner) == Numerics(0.0)
