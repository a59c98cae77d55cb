"""Traces a compiled DoRA layer's norm for a GPU that is not there, and prints as JSON what the compiler gets.

    python tests/compiled_layers.py [rank]

A process of its own: the tests' one has Triton's interpreter, whose kernels cannot be compiled.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

from packlora.ops.row_norm import row_norm, triton_path

N, K, PROCESSORS = 320, 512, 132


class Hopper:
    """As much of a driver as it takes to read a kernel."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def traced(rank: int) -> dict[str, Any]:
    """By "calls" the operations of the graph; by "launch" the kernel's grid and arguments; by "written" its outputs."""
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    triton.runtime.driver.set_active(Hopper())
    on_a_gpu = (
        mock.patch.object(triton_path, "processors", return_value=PROCESSORS),
        mock.patch.object(row_norm, "_capable", lambda device: device.type == "cuda"),
        mock.patch("torch._subclasses.fake_tensor.init_gpu_context", return_value=None),
    )
    with on_a_gpu[0], on_a_gpu[1], on_a_gpu[2], FakeTensorMode():
        operands = [torch.empty(*s, dtype=torch.bfloat16, device="cuda") for s in ((N, K), (rank, K), (N, rank))]
        compiled = torch.compile(
            lambda *own: row_norm.traced_row_norm(*own, 2.0), backend=aot_autograd(fw_compiler=kept), fullgraph=True
        )
        compiled(*operands)
    (graph,) = graphs
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    (launch,) = (node for node in calls if "triton_kernel_wrapper" in str(node.target))
    numbers = {name: value for name, value in launch.kwargs["kwargs"].items() if isinstance(value, int | float)}
    return {
        "calls": [str(node.target) for node in calls],
        "launch": {"grid": launch.kwargs["grid"][0], **numbers},
        "written": launch.kwargs["tensors_to_clone"],
    }


if __name__ == "__main__":
    print(json.dumps(traced(int(sys.argv[1]) if len(sys.argv) > 1 else 16)))
