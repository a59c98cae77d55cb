"""Which GPU kernels start on, told by stand-ins for torch.cuda."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from packlora.base.device import choose_device
from packlora.errors import InputError
from packlora.ops import gpu
from packlora.ops.attention import attention


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


@pytest.mark.parametrize(("kind", "calls"), [((7, 5), [300, 200, 300]), ((8, 0), [])])
def test_attention_without_kernels_is_torch_s_own_for_each_sample_and_makes_no_mask(
    kind: tuple[int, int], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors of a GPU that have no numbers."""
    gpu.capability.cache_clear()
    monkeypatch.setattr(gpu, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: kind)
    found = list[int]()
    plain = torch.nn.functional.scaled_dot_product_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        assert how == {"is_causal": True, "scale": 0.25} and q.shape == k.shape == v.shape
        found.append(q.shape[2])
        return plain(q, k, v, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(attention, "_one_call", lambda q, *_: q.transpose(0, 1))
    monkeypatch.setattr(attention, "blocks_of", lambda *_: None)
    with FakeTensorMode():
        q, k, v = (torch.empty(H, 800, 16, dtype=torch.float16, device="cuda") for H in (4, 2, 2))
        y = attention.packed_attention(q, k, v, [300, 200, 300], 0.25)
    assert found == calls and y.shape == (800, 4, 16) and y.dtype == torch.float16
    gpu.capability.cache_clear()


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
