"""Launches that are made again: only where operands lie as they must, with their addresses, and descriptors encoded once; and
launches whose kernels are compiled ahead."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packlora.commands.speed import quick_launches
from packlora.ops import launcher
from packlora.ops.launcher import CachedLaunch, Descriptor, Passage, launch, launched


class Door:
    """Triton's launcher of a kernel. Releases from 3.7 on hand the arguments on as one sequence."""

    nested = False
    BEFORE = (7, False, False, None, None, (4, 1, 0), None, None, None)
    """What the function that launches takes between the stream and the arguments."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self.launch = launch

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, *args: Any) -> None:
        self.launch(x, y, z, stream, function, False, False, None, None, metadata, *args)


class NestedDoor(Door):
    nested = True
    BEFORE = (7, False, False, (4, 1, 0), None, None, None, None, None, ["annotations"], b"signature")

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, *args: Any) -> None:
        own = (function, False, False, metadata, *args[:3], None, None, ["annotations"], b"signature")
        self.launch(x, y, z, stream, *own, args[3:])


class Kernel:
    """In the place of a triton.jit function: [grid](*args, **constants) compiles and launches."""

    door: type[Door] = Door

    def __init__(self, metas: list[dict[str, Any]] | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.compiled = 0
        self.params: list[Any] = []
        inner = self._wrapped(self._take, metas) if metas else self._take
        self.result = SimpleNamespace(run=self.door(inner), function=7, packed_metadata=(4, 1, 0))

    def _take(self, *args: Any) -> None:
        before, rest = 4 + len(self.door.BEFORE), self.door.BEFORE
        assert args[4:before] == rest
        self.calls.append((*args[:4], *(args[before] if self.door.nested else args[before:])))

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


@pytest.fixture(autouse=True, params=[Door, NestedDoor])
def _without_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "door", request.param)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launcher, "is_quick", lambda: True)
    monkeypatch.setattr(launcher, "JITFunction", Kernel)
    monkeypatch.setattr(launcher, "_COMPILED", {})
    monkeypatch.setattr(Descriptor, "encoded", lambda self, meta: (meta["name"], self.base.data_ptr(), *self.shape))


def tensor(shift: int = 0) -> torch.Tensor:
    """At a multiple of 16 bytes and `shift` elements of 4."""
    t = torch.zeros(32)[shift:]
    assert t.data_ptr() % 16 == 4 * shift % 16
    return t


def test_a_launch_made_again_has_the_addresses_of_its_own_operands() -> None:
    kernel, launches, grid = Kernel(), {}, (5, 2)
    first, other = (tensor(), None, 3, tensor()), (tensor(), None, 3, tensor())
    launch(kernel, grid, first, launches, "key", BM=16, num_warps=4, num_stages=1)
    assert kernel.compiled == 1 and not kernel.calls  # the first one is Triton's
    assert launched(launches, "key", other) and not launched(launches, "another key", other)
    launch(kernel, grid, first, launches, "key", BM=16, num_warps=4, num_stages=1)
    assert kernel.compiled == 1
    assert kernel.calls == [(5, 2, 1, 99, a.data_ptr(), None, 3, b.data_ptr(), 16) for a, _, _, b in (other, first)]


def test_a_number_that_is_not_specialised_asks_triton_once_whatever_it_is() -> None:
    for varies, asked in ((True, 2), (False, 4)):
        kernel = Kernel()
        kernel.params = [SimpleNamespace(do_not_specialize=False), SimpleNamespace(do_not_specialize=varies)]
        for number in (7, 1, 48, 9, 2**40):  # the last one has another type
            launch(kernel, (1,), (tensor(), number), num_warps=4, num_stages=1)
        assert kernel.compiled == asked
        assert [call[5] for call in kernel.calls] == ([1, 48, 9] if varies else [9])


def test_an_operand_that_lies_elsewhere_is_not_launched_with() -> None:
    kernel, launches = Kernel(), {}
    launch(kernel, (1,), (tensor(), tensor(1)), launches, "key", num_warps=4, num_stages=1)
    assert not launched(launches, "key", (tensor(2), tensor(1)))
    assert not kernel.calls
    for shift in range(4):  # the second one had no place to keep
        assert launched(launches, "key", (tensor(), tensor(shift)))
    launch(kernel, (1,), (tensor(2), tensor(1)), launches, "key", num_warps=4, num_stages=1)
    assert kernel.compiled == 2  # for such places
    assert launched(launches, "key", (tensor(), tensor(1)))  # still the one for places that are multiples
    assert not launched(launches, "key", (tensor(2), tensor(1)))


def test_descriptors_are_encoded_once_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = Descriptor.encoded

    def counted(self: Descriptor, meta: dict[str, Any]) -> tuple[Any, ...]:
        encoded.append(self.base.data_ptr())
        return encode(self, meta)

    monkeypatch.setattr(Descriptor, "encoded", counted)
    monkeypatch.setattr(launcher, "MAPS", 3)
    kernel, launches = Kernel([{"name": "X"}, {"name": "Y"}]), {}
    X, Y, p = tensor().view(4, 8), tensor().view(8, 4), tensor()

    def args(x: torch.Tensor) -> tuple[Any, ...]:
        return Descriptor(x, [4, 4]), p, Descriptor(Y, [8, 4]), 11

    launch(kernel, (1,), args(X), launches, "key", num_warps=4, num_stages=1)
    others = [tensor().view(4, 8) for _ in range(4)]
    for x in (X, others[0], X, others[0]):
        assert launched(launches, "key", args(x))
        assert kernel.calls[-1][4:] == ("X", x.data_ptr(), 4, 8, p.data_ptr(), "Y", Y.data_ptr(), 8, 4, 11)
    assert sorted(encoded) == sorted([X.data_ptr(), others[0].data_ptr(), Y.data_ptr()])
    for x in (*others, X):  # more than are kept
        assert launched(launches, "key", args(x))
        assert kernel.calls[-1][5] == x.data_ptr()
    assert not launched(launches, "key", args(tensor(2)[:28].view(4, 7)))


@pytest.mark.parametrize("known", [True, False], ids=["encoded here", "encoded by Triton"])
def test_a_tensor_in_the_place_of_a_descriptor_is_described_as_the_first_one_was(known: bool) -> None:
    kernel, launches = Kernel([{"name": "X"}] if known else None), {}
    first, other = tensor(), tensor()
    launch(kernel, (1,), (Descriptor(first, [4, 4], [6, 5], [5, 1]), 3), launches, "key", num_warps=4, num_stages=1)
    assert launched(launches, "key", (other, 3))
    passed = kernel.calls[-1][4:]
    if known:
        assert passed == ("X", other.data_ptr(), 6, 5, 3)
    else:
        made, number = passed
        assert (made.base.data_ptr(), made.block_shape, made.shape, made.strides) == (
            other.data_ptr(),
            [4, 4],
            [6, 5],
            [5, 1],
        )
        assert number == 3
    assert not launched(launches, "key", (tensor(2), 3))


def test_a_site_of_another_release_leaves_descriptors_to_triton() -> None:
    """Where the function around the one that launches is not the one that is known."""
    kernel = Kernel()
    X = Descriptor(tensor().view(4, 8), [4, 4])
    passage = Passage.recorded(kernel.result, (X, 5))
    assert passage is not None and not kernel.calls
    assert CachedLaunch(passage, (1,), (X, 5), (), 0)((X, 5))
    assert kernel.calls[0][4:] == (X, 5)


def test_a_launch_that_is_not_understood_goes_through_tritons_door_every_time() -> None:
    """A launcher that takes scratch memory for every launch, and one that passes something else."""

    def scratch(self: Door, *args: Any) -> None:
        self.launch(*args[:4], torch.zeros(3), *args[9:])

    def other(self: Door, *args: Any) -> None:
        self.launch(args[9:], *args[:9])

    for odd in (scratch, other):
        kernel, launches = Kernel(), {}
        kernel.result.run = type("Odd", (Door,), {"__call__": odd})(kernel._take)
        for times in (1, 2, 3):
            launch(kernel, (1,), (tensor(), 5), launches, "key", num_warps=4, num_stages=1)
            assert kernel.compiled == times
        assert not launches and not kernel.calls


def test_in_a_rehearsal_each_kernel_is_compiled_once_by_other_threads_and_nothing_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices, seen = list[int](), list[tuple[int, tuple[Any, ...], dict[str, Any]]]()
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)

    class Compiled(Kernel):
        def warmup(self, *args: Any, grid: Any, **constants: Any) -> None:
            seen.append((threading.get_ident(), args, {"grid": grid, **constants}))
            if constants.get("BM") == 64:
                raise RuntimeError("too large")

    known, kernel, launches = Compiled(), Compiled(), {}
    launch(known, (1,), (tensor(),), launches, "known", BM=16, num_warps=4, num_stages=1)
    with launcher.rehearsal():
        for shift in (0, 1, 0):
            launch(kernel, (2,), (tensor(shift), 5), launches, "key", BM=16, num_warps=4, num_stages=1)
        launch(kernel, (2,), (tensor(), 5), launches, "large", BM=64, num_warps=4, num_stages=1)
        launch(kernel, (0,), (tensor(), 5), launches, "none", BM=32, num_warps=4, num_stages=1)
        launch(known, (1,), (tensor(),), BM=16, num_warps=4, num_stages=1)
    assert kernel.compiled == 0 and known.compiled == 1 and not kernel.calls and list(launches) == ["known"]
    assert len(seen) == len(devices) == 3 and threading.get_ident() not in {thread for thread, _, _ in seen}
    assert sorted(made["BM"] for _, _, made in seen) == [16, 16, 64]
    assert {made["grid"] for _, _, made in seen} == {(2,)}
    launch(kernel, (2,), (tensor(), 5), launches, "key", BM=16, num_warps=4, num_stages=1)
    assert kernel.compiled == 1  # as ever


# --- the check at the start --------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("triton.backends.nvidia") is None, reason="a triton without NVIDIA's backend"
)
def test_the_check_at_the_start_knows_the_installed_triton_and_refuses_a_changed_one(tmp_path: Path) -> None:
    """By Triton's own compiler and launcher, up to the driver's library."""
    if Kernel.door is not Door:
        return  # once will do
    script, root = Path(__file__).parent.parent / "triton_launches.py", Path(__file__).parent.parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["why"] is None
    assert (found["launches"], found["doors"], found["cached"], found["alike"]) == (3, 1, 2, True)
    assert (found["rehearsed"], found["then"]) == ([1, 0, False], [1, 1])
    assert found["numbered"] and found["turned"]


def test_doctor_says_whether_launches_are_quick_and_if_not_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert quick_launches() == "off: no GPU is usable"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for reason, told in ((None, "on"), ("triton 9.9: it passes a moon", "off: triton 9.9: it passes a moon")):
        monkeypatch.setattr(launcher, "why_usual", lambda reason=reason: reason)
        assert quick_launches().startswith(told)
    monkeypatch.setattr("packlora.commands.speed.HAS_TRITON", False)
    assert quick_launches() == "off: the triton package is not installed"
