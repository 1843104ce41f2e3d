"""The one primitive (:class:`rakv_cluster.model.step.Runner`) over any transformers RoPE model."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from rakv_cluster.kv.layout import KvLayout
from rakv_cluster.model.attention import BACKEND, PLAN_KWARG, StepCache, plan_step
from rakv_cluster.model.step import Step


class TransformersRunner:
    """Runs steps through an unchanged transformers causal language model.

    Switches ``model`` to the packed attention of :mod:`rakv_cluster.model.attention` for good:
    it cannot run plain forwards afterwards. Not thread-safe.
    """

    def __init__(self, model: PreTrainedModel, layout: KvLayout, *, context_tokens: int) -> None:
        model.eval()
        model.set_attn_implementation(BACKEND)
        self._model = model
        self._layout = layout
        self._context_tokens = context_tokens
        self._vocab_size = int(model.get_output_embeddings().weight.shape[0])

    @property
    def layout(self) -> KvLayout:
        """Layout of the KV it reads and writes."""
        return self._layout

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._vocab_size

    @property
    def context_tokens(self) -> int:
        """Most positions a sequence may have."""
        return self._context_tokens

    @property
    def device(self) -> torch.device:
        """Where the weights and buffers live."""
        device: torch.device = self._model.device
        return device

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """Logits, float32 ``[R, vocab_size]`` on ``device``: an inference tensor, the caller's.

        Writes K/V into the spans' buffers; leaves their lengths alone. Raises ``ValueError`` for
        a step whose spans do not cover its rows or do not fit their buffers.
        """
        plan = plan_step(step, self.device)
        out = self._model(
            input_ids=step.token_ids.to(self.device, non_blocking=True)[None],
            position_ids=plan.positions[None],
            cache=StepCache(plan),
            use_cache=True,
            logits_to_keep=step.logit_rows.to(self.device, non_blocking=True),
            **{PLAN_KWARG: plan},
        )
        logits: torch.Tensor = out.logits[0]
        return logits.float()
