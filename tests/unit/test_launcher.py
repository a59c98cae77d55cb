"""Launches that are made again: only where operands lie as they must, with their addresses, and descriptors encoded once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packlora.ops.lora_linear import launcher
from packlora.ops.lora_linear.launcher import Descriptor, Site, launch, launched

BEFORE = (7, False, False, None, None, (4, 1, 0), None, None, None)
"""What Triton's own function takes before the arguments, see Site.before."""


class Kernel:
    """In the place of a triton.jit function: [grid](*args, **constants) compiles and launches."""

    def __init__(self, metas: list[dict[str, Any]] | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.compiled = 0
        inner = self._wrapped(self._take, metas) if metas else self._take
        run = SimpleNamespace(
            launch=inner, global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=False
        )
        self.result = SimpleNamespace(run=run, function=7, packed_metadata=(4, 1, 0))

    def _take(self, *args: Any) -> None:
        self.calls.append(args)

    @staticmethod
    def _wrapped(launcher: Callable[..., None], tensordesc_meta: list[dict[str, Any]]) -> Callable[..., None]:
        """As Triton has it: a function around the one that launches, which encodes descriptors."""

        def inner(*args: Any) -> None:
            raise AssertionError(f"descriptors are encoded anew with {tensordesc_meta} for {launcher}: {args}")

        return inner

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*args: Any, **constants: Any) -> Any:
            self.compiled += 1
            return self.result

        return run


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launcher, "_KNOWN", True)
    monkeypatch.setattr(launcher, "JITFunction", Kernel)
    monkeypatch.setattr(launcher, "_COMPILED", {})
    monkeypatch.setattr(Descriptor, "encoded", lambda self, meta: (meta["name"], self.base.data_ptr(), *self.shape))


def tensor(shift: int = 0) -> torch.Tensor:
    """At a multiple of 16 bytes and `shift` elements of 4."""
    t = torch.zeros(32)[shift:]
    assert t.data_ptr() % 16 == 4 * shift % 16
    return t


def test_a_launch_made_again_has_the_addresses_of_its_own_operands() -> None:
    kernel, sites, grid = Kernel(), {}, (5, 2)
    first, other = (tensor(), None, 3, tensor()), (tensor(), None, 3, tensor())
    launch(kernel, grid, first, sites, "key", BM=16, num_warps=4, num_stages=1)
    assert kernel.compiled == 1 and not kernel.calls  # the first one is Triton's
    assert launched(sites, "key", other) and not launched(sites, "another key", other)
    launch(kernel, grid, first, sites, "key", BM=16, num_warps=4, num_stages=1)
    assert kernel.compiled == 1
    assert kernel.calls == [
        (5, 2, 1, 99, *BEFORE, a.data_ptr(), None, 3, b.data_ptr(), 16) for a, _, _, b in (other, first)
    ]


def test_an_operand_that_lies_elsewhere_is_not_launched_with() -> None:
    kernel, sites = Kernel(), {}
    launch(kernel, (1,), (tensor(), tensor(1)), sites, "key", num_warps=4, num_stages=1)
    assert not launched(sites, "key", (tensor(2), tensor(1)))
    assert not kernel.calls
    for shift in range(4):  # the second one had no place to keep
        assert launched(sites, "key", (tensor(), tensor(shift)))
    launch(kernel, (1,), (tensor(2), tensor(1)), sites, "key", num_warps=4, num_stages=1)
    assert kernel.compiled == 2  # for such places
    assert launched(sites, "key", (tensor(), tensor(1)))  # still the one for places that are multiples
    assert not launched(sites, "key", (tensor(2), tensor(1)))


def test_descriptors_are_encoded_once_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = Descriptor.encoded

    def counted(self: Descriptor, meta: dict[str, Any]) -> tuple[Any, ...]:
        encoded.append(self.base.data_ptr())
        return encode(self, meta)

    monkeypatch.setattr(Descriptor, "encoded", counted)
    monkeypatch.setattr(launcher, "MAPS", 3)
    kernel, sites = Kernel([{"name": "X"}, {"name": "Y"}]), {}
    X, Y, p = tensor().view(4, 8), tensor().view(8, 4), tensor()

    def args(x: torch.Tensor) -> tuple[Any, ...]:
        return Descriptor(x, [4, 4]), p, Descriptor(Y, [8, 4]), 11

    launch(kernel, (1,), args(X), sites, "key", num_warps=4, num_stages=1)
    others = [tensor().view(4, 8) for _ in range(4)]
    for x in (X, others[0], X, others[0]):
        assert launched(sites, "key", args(x))
        assert kernel.calls[-1][13:] == ("X", x.data_ptr(), 4, 8, p.data_ptr(), "Y", Y.data_ptr(), 8, 4, 11)
    assert sorted(encoded) == sorted([X.data_ptr(), others[0].data_ptr(), Y.data_ptr()])
    for x in (*others, X):  # more than are kept
        assert launched(sites, "key", args(x))
        assert kernel.calls[-1][14] == x.data_ptr()
    assert not launched(sites, "key", args(tensor(2)[:28].view(4, 7)))


def test_a_site_of_another_release_leaves_descriptors_to_triton() -> None:
    """Where the function around the one that launches is not the one that is known."""

    def unknown(*args: Any) -> None:
        calls.append(args)

    calls: list[tuple[Any, ...]] = []
    kernel = Kernel()
    kernel.result.run.launch = unknown
    X = Descriptor(tensor().view(4, 8), [4, 4])
    site = Site(kernel.result, (1,), (X, 5), (), 0)
    assert site((X, 5))
    assert calls[0][13:] == (X, 5)
