"""Moving KV between device and host. What needs a GPU runs only where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rakv_cluster.kv.layout import KvLayout, bits
from rakv_cluster.kv.transfer import CudaTransfer, HostTransfer, Transfer, transfer_for

LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=4, dtype="float32")
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    return torch.device(request.param)


@pytest.fixture
def transfer(device: torch.device) -> Transfer:
    return transfer_for(device)


def buffer(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(LAYOUT.shape(16), generator=generator).to(device)


def test_the_device_decides_how(device: torch.device, transfer: Transfer) -> None:
    expected = CudaTransfer if device.type == "cuda" else HostTransfer
    assert isinstance(transfer, expected)


def test_a_host_copy_is_of_that_moment_contiguous_and_private(
    device: torch.device, transfer: Transfer
) -> None:
    data = buffer(device)
    expected = bits(data[:, :, :, 5:9].contiguous().cpu()).copy()

    copy = transfer.to_host(data[:, :, :, 5:9])
    data.zero_()

    assert copy.wait().flags.c_contiguous
    if device.type == "cpu":  # a store in RAM need not copy it once more
        assert not copy.wait().flags.writeable
        assert copy.wait().base is None
    assert np.array_equal(copy.wait(), expected)


def test_what_lands_comes_into_its_slots_and_no_others(
    device: torch.device, transfer: Transfer
) -> None:
    data, before = buffer(device), buffer(device)
    slots = [data[:, :, :, 2:5], data[:, :, :, 9:10]]

    landings = [transfer.landing(each, LAYOUT) for each in slots]
    for number, landing in enumerate(landings):
        assert landing.device.type == "cpu"
        landing.fill_(float(number + 1))
    transfer.to_device(list(zip(slots, landings, strict=True)))

    before[:, :, :, 2:5], before[:, :, :, 9:10] = 1.0, 2.0
    assert torch.equal(data, before)
