"""Which GPU kernels start on, told by stand-ins for torch.cuda."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packlora.base.device import choose_device
from packlora.errors import InputError
from packlora.ops import gpu


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Of which the first is current; what is current now."""
    current = {"number": 0}

    class OnDevice:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            self.before, current["number"] = current["number"], self.device.index or 0

        def __exit__(self, *of: Any) -> None:
            current["number"] = self.before

    def set_device(device: torch.device) -> None:
        current["number"] = device.index

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current["number"])
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    return current


@pytest.mark.parametrize(("device", "there"), [("cpu", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_kernels_start_where_their_operands_are(device: str, there: int, two_gpus: dict[str, int]) -> None:
    with gpu.on_device(torch.device(device)):
        assert two_gpus["number"] == there
    assert two_gpus["number"] == 0


@pytest.mark.parametrize(("name", "there"), [("auto", 0), ("cpu", 0), ("cpu:0", 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_numbered_gpu_becomes_the_current_one(name: str, there: int, two_gpus: dict[str, int]) -> None:
    choose_device(name)
    assert two_gpus["number"] == there


@pytest.mark.parametrize(
    ("hip", "kind", "asked", "products", "others"),
    [
        (None, (8, 0), "auto", None, True), (None, (8, 0), "off", "PACKLORA_KERNELS=off", False),
        (None, (8, 0), "yes", "PACKLORA_KERNELS is 'yes'", False), (None, (7, 5), "auto", "8.0 or newer", True),
        (None, (7, 5), "on", "8.0 or newer", True), (None, (7, 0), "auto", "8.0 or newer", False),
        ("6.4", "gfx942:sramecc+:xnack-", "auto", None, True), ("6.4", "gfx1100", "auto", None, True),
        ("6.4", "gfx1100", "off", "PACKLORA_KERNELS=off", False), ("6.4", "gfx90a:x", "auto", "on tries them on gfx90a", False),
        ("6.4", "gfx90a:x", "on", None, True),
    ],
)  # fmt: skip
def test_kernels_run_on_gpus_that_they_were_compiled_for_unless_they_are_switched_off(
    hip: str | None, kind: Any, asked: str, products: str | None, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", 7)
    for cached in (gpu.capability, gpu.architecture):
        cached.cache_clear()
    monkeypatch.setattr(gpu, "HAS_TRITON", True)
    monkeypatch.setattr(gpu, "ASKED", asked)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: kind)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=kind))
    reason = gpu.why_no_kernels(device)
    assert (reason is None) if products is None else products in (reason or "")
    assert gpu.runs_triton(device) == others
    assert not (hip and gpu.has_copy_engine(device))
    for cached in (gpu.capability, gpu.architecture):
        cached.cache_clear()


@pytest.mark.parametrize("name", ["cpu:1", "cpu:3", "cpu:127"])
def test_a_numbered_cpu_is_refused(name: str) -> None:
    with pytest.raises(
        InputError, match=f"device: '{name}' is not there; this machine's processors are one device, cpu"
    ):
        choose_device(name)


def test_a_gpu_that_is_not_there_leaves_the_current_one(two_gpus: dict[str, int]) -> None:
    with pytest.raises(InputError, match="'cuda:2' is not there; this machine has 2 usable GPUs"):
        choose_device("cuda:2")
    assert two_gpus["number"] == 0
