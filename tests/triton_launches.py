"""Launches kernels by Triton as it is installed, up to the call that would reach a GPU, and prints as JSON what is found.

    python tests/triton_launches.py

Compiling and the launcher are Triton's own; the driver's library, which needs a GPU, is replaced. Must be a process of its own:
the tests' one has Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver

from packlora.ops import launcher

PASSED: list[tuple[Any, ...]] = []
STREAM = 99


class Library:
    """In the place of the driver's compiled library."""

    def __init__(self) -> None:
        self.launch = lambda *args: PASSED.append(args)
        self.load_binary = lambda *args: (1, 7, 32, 0, 1024)
        self.get_device_properties = lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132}
        self.build_signature_metadata = lambda signature: ",".join(map(str, signature)).encode()
        self.fill_tma_descriptor = self.fill_tma_descriptor_tiled = lambda address, *rest: Encoded()


class Encoded:
    """A tensor descriptor as a kernel takes it."""


class Driver(driver.CudaDriver):  # type: ignore[misc]
    def __init__(self) -> None:
        self.utils, self.launcher_cls = Library(), driver.CudaLauncher
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main() -> dict[str, Any]:
    made_from_source = SimpleNamespace(launch=lambda *args: PASSED.append(args))
    patches = [
        mock.patch.object(driver, "compile_module_from_src", create=True, return_value=made_from_source),
        mock.patch.object(driver, "library_dirs", list, create=True),
        mock.patch.object(driver, "PyKernelArg", SimpleNamespace, create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", create=True, return_value=STREAM),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(torch, "device", return_value="cpu"),
        mock.patch.object(launcher, "has_copy_engine", return_value=True),
    ]  # fmt: skip
    for patch in patches:
        patch.start()
    triton.runtime.driver.set_active(Driver())
    found: dict[str, Any] = {"triton": triton.__version__, "why": launcher.why_usual()}

    # the same launch thrice: by Triton, by a cached launch that was just made, and by the one that was kept
    cached: dict[Any, Any] = {}
    doors = 0
    run = triton.runtime.jit.JITFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal doors
        doors += 1
        return run(self, *args, **kwargs)

    PASSED.clear()
    with mock.patch.object(triton.runtime.jit.JITFunction, "run", counted):
        for key in ("first", "other", "other"):
            x, y = torch.zeros(5, 32), torch.zeros(5, 32)
            launcher.launch(
                launcher.probe_kernel, (5,), (x, None, y, 160, 1, 7), cached, key, MAPPED=False, HALF=0.5, BLOCK=32,
                num_warps=1, num_stages=1,
            )  # fmt: skip
    plain = [launcher._plain(call) for call in PASSED]
    found |= {"launches": len(PASSED), "doors": doors, "cached": len(cached)}
    found["alike"] = all(len(call) == len(plain[0]) and call[:5] == plain[0][:5] for call in plain)

    # compiled ahead, by another thread, and launched after it without being compiled again
    compiled: list[str] = []
    compile_ = launcher.probe_kernel.compile

    def noted(*args: Any, **kwargs: Any) -> Any:
        compiled.append(threading.current_thread().name)
        return compile_(*args, **kwargs)

    PASSED.clear()
    args = (torch.zeros(5, 32), None, torch.zeros(5, 32), 160, 1, 7)
    more = {"MAPPED": False, "HALF": 0.25, "BLOCK": 32, "num_warps": 1, "num_stages": 1}
    with (
        mock.patch.object(launcher.probe_kernel, "compile", noted),
        mock.patch.object(torch.cuda, "set_device"),
    ):
        with launcher.rehearsal():
            launcher.launch(launcher.probe_kernel, (5,), args, {}, "key", **more)
            launcher.launch(launcher.probe_kernel, (5,), args, {}, "key", **more)
        found["rehearsed"] = len(compiled), len(PASSED), threading.main_thread().name in compiled
        launcher.launch(launcher.probe_kernel, (5,), args, {}, "key", **more)
        found["then"] = len(compiled), len(PASSED)

    # a release that passes something new with every launch, and one that passes arguments in another order
    launches = iter(range(10**6))
    usual = driver.CudaLauncher.__call__

    def numbered(self: Any, *args: Any) -> None:
        own = self.launch
        with mock.patch.object(self, "launch", lambda *passed: own(*passed[:5], next(launches), *passed[5:])):
            usual(self, *args)

    def turned(self: Any, *args: Any) -> None:
        own = self.launch
        with mock.patch.object(self, "launch", lambda *passed: own(*passed[::-1])):
            usual(self, *args)

    for name, other in (("numbered", numbered), ("turned", turned)):
        launcher.why_usual.cache_clear()
        with mock.patch.object(driver.CudaLauncher, "__call__", other):
            found[name] = launcher.why_usual()
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
