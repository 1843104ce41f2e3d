"""The CUDA path against the CPU's. Runs only where there is a GPU (`make test-gpu`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rakv_cluster.kv.buffer import KvBuffer
from rakv_cluster.model.loader import DtypeName, LoadedModel, load_model
from rakv_cluster.model.selection import KernelOptions
from rakv_cluster.model.step import Span, Step
from rakv_cluster.testing.tiny_models import save_tiny_model, tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]
TOKENS = 40


def logits(loaded: LoadedModel) -> torch.Tensor:
    """Of a prompt in two pieces and a single token behind it."""
    runner = loaded.runner
    shape, dtype = runner.layout.shape(64), runner.layout.torch_dtype
    buffer = KvBuffer(torch.zeros(shape, dtype=dtype, device=runner.device))
    ids = torch.arange(3, 3 + TOKENS)
    rows = []
    for start, stop in ((0, 25), (25, TOKENS - 1), (TOKENS - 1, TOKENS)):
        span = Span(buffer, 0, stop - start, start, stop - 1)
        positions = torch.arange(start, stop)
        step = Step(ids[start:stop], positions, (span,), torch.arange(stop - start))
        rows.append(runner.forward(step).cpu())
    return torch.cat(rows)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.2)])
def test_logits_are_the_cpu_s(
    dtype: DtypeName, tolerance: float, graphs: bool, tmp_path: Path
) -> None:
    folder = str(save_tiny_model(tmp_path / "tiny", tiny_llama(seed=1)))
    expected = logits(load_model(folder))
    options = KernelOptions(cuda_graphs=graphs)
    loaded = load_model(folder, device="cuda", dtype=dtype, kernels=options)
    assert loaded.card.numeric_class.startswith("fused[plain,graphs]" if graphs else "fused[plain]")
    assert loaded.refused_kernels == ()
    assert float((logits(loaded).float() - expected).abs().max()) < tolerance
