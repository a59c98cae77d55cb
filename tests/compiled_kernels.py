"""Compiles, without a GPU, the kernels that real calls launch, and prints as JSON what became of them.

    python tests/compiled_kernels.py [target [one of MORE]]

A target is a compute capability without its point, or an architecture of AMD; both without what packlora leaves to torch there.

The operators run on CPU tensors with a launch that compiles in place of launching, specialised as Triton would for
these arguments; results mean nothing. Must be a process of its own: the tests' one has Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from fp8_cases import in_fp8
from group_cases import cast, make_case
from seeds import SOAK
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from packlora.codes import four_bit
from packlora.fp8 import change_launches
from packlora.fp8 import launches as fp8_launches
from packlora.ops import gpu, launcher
from packlora.ops.attention import cached_kernel as cached_attention
from packlora.ops.attention import triton_path as attention_path
from packlora.ops.cross_entropy import triton_path as cross_entropy_path
from packlora.ops.dropout import kernel as dropping
from packlora.ops.lora_experts import low_rank as experts_low_rank
from packlora.ops.lora_experts.routing import Routing
from packlora.ops.lora_linear import few_rows
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.changes import Mask
from packlora.ops.lora_linear.kernels import config as kernel_config
from packlora.ops.lora_linear.kernels import forward as forward_path
from packlora.ops.lora_linear.kernels import sizes as block_sizes
from packlora.ops.lora_linear.plan import ROUTED, Plan
from packlora.ops.rms_norm import triton_path as rms_norm_path
from packlora.ops.rms_norm.reference import KINDS as KINDS_OF_RMS_NORMS
from packlora.ops.row_norm import row_norm
from packlora.ops.row_norm import triton_path as row_norm_path
from packlora.ops.row_norm.types import NormProblem

TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
FUSED = Plan("routed", "fused", "one-pass", "fused")
EPILOGUE = Plan("mm", "epilogue", "one-pass", "fused")
KINDS: dict[str, dict[str, Any]] = {
    "one adapter": {"ranks": [[16]], "dropouts": [0.1]},
    "rank 384": {"ranks": [[384]], "dropouts": [0.0]},
    "four adapters, siblings": {"ranks": [[8, 16], [16, 0], [32, 40], [64, 8]], "dropouts": [0.0, 0.1, 0.1, 0.05]},
    "DoRA, beside LoRA": {"ranks": [[16], [8]], "dropouts": [0.0, 0.0], "dora": [True, False]},
    "DoRA": {"ranks": [[16]], "dropouts": [0.0], "dora": [True]},
    "DoRA, rank 64": {"ranks": [[64]], "dropouts": [0.1], "dora": [True], "base_dropped": False},
}
USUAL = KINDS if SOAK else {name: KINDS[name] for name in ("four adapters, siblings", "DoRA, beside LoRA")}
MANY, FEW = 132, ("one adapter", "four adapters, siblings")
"""Processors, and kinds that are also compiled with the blocks that launches choose for so many: 1024 tokens are few then."""
FIRST = {
    "four adapters, siblings": [(1, ROUTED)], "DoRA, beside LoRA": [(1, EPILOGUE), (1, FUSED), (MANY, FUSED)],
}  # fmt: skip
"""Processors and plans by usual kind, where not all are compiled: each plan once, and few and many processors."""
NORMS = (16, 64, 200, 384) if SOAK else (16, 384)
"""Ranks of norms that are compiled."""
RMS_NORMS = (64, 128, 1024, 3072, 8192, 16384) if SOAK else (128, 16384)
"""Features of RMS norms that are compiled."""
HEADS = (64, 80, 128, 256) if SOAK else (128,)
"""Features of a head of attention that is compiled."""
MORE: dict[str, dict[str, Any]] = {
    "biases alone on siblings": {"ranks": [[16, 0], [8, 0]], "dropouts": [0.0, 0.0], "biases": [True, True]},
    "one adapter of rank 64": {"ranks": [[64]], "dropouts": [0.0]},
}
"""Compiled by tests of their own, with the usual plan."""
TRACED = ("direct_kernel",)
"""Kernels that Inductor launches too, which passes a float in 64 bits where Triton passes 32."""
WAVES = {"gfx942": 64, "gfx1100": 32}
"""Threads of a warp by architecture of AMD."""
Row = dict[str, Any]


def target_of(name: str) -> GPUTarget:
    return GPUTarget("hip", name, WAVES[name]) if name in WAVES else GPUTarget("cuda", int(name), 32)


def compiled(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], target: GPUTarget) -> Row:
    """Registers are the assembler's; loads and stores of one element of 16 bits are PTX's."""
    num_warps, num_stages = constants.pop("num_warps"), constants.pop("num_stages")
    names, fixed = kernel.arg_names, set(kernel.do_not_specialize or ())
    types, values, attributes = {}, {}, {}
    for index, (name, value) in enumerate(zip(names, [*args, *constants.values()], strict=True)):
        if name in constants or value is None or (type(value) is int and value == 1 and name not in fixed):
            types[name], values[(index,)] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            types[name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>".replace(" ", "")
        elif isinstance(value, torch.Tensor):
            types[name] = f"*{TYPES[value.dtype]}"
            if value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            types[name] = "fp64" if kernel.__name__ in TRACED else "fp32"
        else:
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and name not in fixed:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, constexprs=values, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    made = triton.compile(source, target=target, options=options)
    own = {
        "kernel": kernel.__name__, "constants": {key: str(value) for key, value in constants.items()},
        "shared": made.metadata.shared,
    }  # fmt: skip
    if target.backend == "hip":
        text = made.asm["amdgcn"]
        products = len(re.findall("v_(?:mfma|wmma)_", text))
        return own | {"products": products, "threads": num_warps * target.warp_size}
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [folder / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    (registers, stack), *_ = re.findall(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    return own | {
        "registers": int(registers), "stack": int(stack),
        "single": len(re.findall(r"(?:ld|st)\.global\.(?:b|u)16", made.asm["ptx"])),
    }  # fmt: skip


def captured(name: str, kinds: dict[str, dict[str, Any]] = USUAL) -> list[Row]:
    """What the kinds launch; of the usual ones also what norms (DoRA's and the model's), the loss and dropout launch."""
    rows: dict[Any, Row] = {}
    target = target_of(name)
    capability = 80 if target.backend == "hip" else int(target.arch)
    half = torch.bfloat16 if capability >= 80 else torch.float16
    everything = kinds is USUAL and capability >= 80
    case = ""

    def take(kernel: Any, grid: Any, args: Any, launches: Any = None, key: Any = None, **constants: Any) -> None:
        kinds = [(t.dtype if isinstance(t, torch.Tensor) else type(t)) for t in args]
        known = (kernel.__name__, *constants.values(), *map(str, kinds))
        if target.backend == "hip" and not SOAK:  # the first launch of each kernel, which takes the largest blocks
            known = (kernel.__name__,)
        if known not in rows and 0 not in grid:
            rows[known] = {"case": case, **compiled(kernel, args, dict(constants), target)}

    patches = [
        mock.patch.object(launcher, "launch", take), mock.patch.object(row_norm_path, "launch", take),
        mock.patch.object(dropping, "launch", take),
        mock.patch.object(dropping, "packed_dropout", lambda x: capability >= 90 and x.element_size() == 2),
        mock.patch.object(row_norm, "KERNELS_ON_CPU", True), mock.patch.object(experts_low_rank, "KERNELS_ON_CPU", True),
        mock.patch.object(torch, "empty", torch.zeros),
        mock.patch.object(gpu, "capability", return_value=divmod(capability, 10)),
        mock.patch.object(row_norm_path, "capability", return_value=divmod(capability, 10)),
        mock.patch.object(kernel_config, "has_little_memory", return_value=target.backend == "hip"),
    ]  # fmt: skip
    for patch in patches:
        patch.start()
    for kind, settings in kinds.items() if capability >= 80 else ():
        for dtype in (torch.bfloat16, torch.float32):
            if dtype == torch.float32 and len(settings["ranks"]) > 1:
                continue
            more = dtype == torch.bfloat16 and kinds is USUAL
            plans = [(1, plan) for plan in ((ROUTED, EPILOGUE, FUSED) if more else (ROUTED,))]
            plans += [(MANY, FUSED)] * (kind in FEW and dtype == torch.bfloat16)
            if kinds is USUAL and not SOAK:
                plans = FIRST[kind]
            for slots, plan in plans:
                case = f"{kind}, {plan.name}, {dtype}, {slots} processors"
                sizes = [512, 256][: len(settings["ranks"][0])]
                drawn = make_case(1024, 256, sizes, with_bias=True, seed=1, dtype=dtype, **settings)
                if len(settings["ranks"]) == 1:  # all tokens, which fused products take in a way of its own
                    drawn = replace(drawn, segments=(replace(drawn.segments[0], start=0, stop=1024),))
                own, leaves = cast(drawn, dtype)
                with mock.patch.object(block_sizes, "processors", return_value=slots):
                    outputs = lora_group(own.x, own.layers, own.segments, own.keys, own.salt, plan)
                    torch.autograd.grad(outputs, list(leaves.values()), own.dy, allow_unused=True)
                    for leaf in leaves.values():
                        leaf.requires_grad_(leaf is own.x)
                    outputs = lora_group(own.x, own.layers, own.segments, own.keys, own.salt, plan)  # frozen adapters
                    torch.autograd.grad(outputs, own.x, own.dy)
    for kind in ("four adapters, siblings", "DoRA, beside LoRA") if everything else ():
        case = f"few tokens, {kind}"
        settings = KINDS[kind] | {"dropouts": [0.0] * len(KINDS[kind]["ranks"])}
        drawn = make_case(
            64, 2048, [512, 256][: len(settings["ranks"][0])], with_bias=True, seed=1, dtype=half, **settings
        )
        own, _ = cast(drawn, half)
        with torch.no_grad(), mock.patch.object(few_rows, "_runs", return_value=True):
            lora_group(own.x, own.layers, own.segments)
    for kind in () if not (everything and capability == 90) else FEW if SOAK else FEW[1:]:
        case = f"{kind}, {FUSED.name}, FP8"
        settings = KINDS[kind]
        sizes = [512, 256][: len(settings["ranks"][0])]
        drawn = make_case(1024, 256, sizes, with_bias=True, seed=1, dtype=torch.bfloat16, **settings)
        if kind == "one adapter":
            drawn = replace(drawn, segments=(replace(drawn.segments[0], start=0, stop=1024),))
        own, leaves = cast(drawn, torch.bfloat16)
        own = in_fp8(own, torch.bfloat16)
        outputs = lora_group(own.x, own.layers, own.segments, own.keys, own.salt, FUSED)
        torch.autograd.grad(outputs, list(leaves.values()), own.dy, allow_unused=True)
        fp8_launches.coded_rows(own.x.detach(), torch.ones(256), 448.0, 1e-30)
        fp8_launches.coded_rows(torch.zeros(64, 12288, dtype=torch.bfloat16), None, 448.0, 1e-30)
    for T, K, N in [(1024, 4096, 1024), (1024, 1024, 12288)] if everything and capability == 90 else ():
        case = f"what dropout changes, {K} x {N}"
        x, d, z = (torch.zeros(T, columns, dtype=torch.bfloat16) for columns in (K, N, N))
        mask = Mask(torch.zeros(T, 2, dtype=torch.int32), 3, 0.1)
        codes = torch.zeros(N * K, dtype=torch.uint8).view(torch.float8_e4m3fn)
        of_x, of_d = (
            change_launches.changed_rows(x, mask), change_launches.scaled_rows(d, torch.ones(N), torch.ones(N), mask, 1e-3)
        )  # fmt: skip
        for kept in (z, None):
            change_launches.add_change(of_x, codes.view(N, K), torch.ones(N), torch.ones(N), d, kept)
        change_launches.add_change_t(of_d, codes.view(K, N), mask, x)
    for rank in NORMS if everything and target.backend == "cuda" else ():
        for dtypes in itertools.product((torch.bfloat16, torch.float32), repeat=2):
            mixed = dtypes[0] != dtypes[1]
            if (
                (rank < 200 and mixed)
                or (rank < 200 and not SOAK and dtypes[0] == torch.float32)
                or (rank >= 200 and not SOAK and dtypes != (torch.bfloat16, torch.float32))
            ):
                continue
            case = f"norm, rank {rank}, A and B {dtypes}"
            weight, A, B = torch.zeros(512, 1024, dtype=torch.bfloat16), torch.zeros(rank, 1024), torch.zeros(512, rank)
            problem = NormProblem(weight, A.to(dtypes[0]), B.to(dtypes[1]), 0.5)
            (ready,) = (row_norm_path.prepared(problem),)
            batch = row_norm_path.batch_of([ready])
            stale = batch.stale(torch.zeros(1, 5, dtype=torch.int64))
            batch.run(stale, torch.zeros(512))
            row_norm_path.direct(problem)
    for D in HEADS if everything else ():
        case = f"attention, {D} features of a head"
        q, k = (torch.zeros(256, heads, D, dtype=torch.bfloat16).transpose(0, 1) for heads in (4, 2))
        blocks = torch.zeros(2, 3, 4, dtype=torch.int32)
        for window, cap in ((None, None), (100, 30.0)) if SOAK else ((100, 30.0),):
            y, sums = attention_path.forward(q, k, k, blocks, 0.1, window, cap)
            attention_path.backward(q, k, k, y, sums, blocks, y, 0.1, window, cap)
        kept, numbers = torch.zeros(64, 2, 256, D, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
        for more in ((None, None, None), (100, 30.0, torch.zeros(4))):
            cached_attention.attend(
                q[:, :64], k[:, :64], k[:, :64], (kept, kept), numbers, numbers, numbers, 0.1, *more
            )
    for rank in () if not everything else (16, 128) if SOAK else (128,):
        case = f"experts, rank {rank}"
        routing = Routing.of(torch.zeros(256, 2, dtype=torch.int64), 4)
        x, w = torch.zeros(256, 1024, dtype=torch.bfloat16), torch.zeros(4, rank, 1024, dtype=torch.bfloat16)
        for repeated in (True, False):
            read = x if repeated else x.repeat(2, 1)
            s = experts_low_rank.down(read, w, routing, repeated)
            experts_low_rank.sums(s, read, routing, repeated)
        experts_low_rank.add_(x.repeat(2, 1), s, w, routing)
        z, more = torch.zeros(512, 1024, dtype=torch.bfloat16), torch.zeros(4, 1024)
        experts_low_rank.add_scaled_(x.repeat(2, 1), x.repeat(2, 1), s, w, more, routing, z)
    for turn, dtype in enumerate((half, torch.float32) if kinds is USUAL else ()):
        case = f"loss and dropout, {dtype}"
        logits, labels = torch.zeros(64, 5008, dtype=dtype), torch.zeros(64, dtype=torch.int64)
        for gradient in (False, True):
            cross_entropy_path.softmax_gradient(logits, labels, torch.ones(64), gradient)
        cross_entropy_path.part_sums(logits, labels)
        cross_entropy_path.part_gradient(logits, labels, torch.ones(64), torch.ones(64), labels == 0)
        odd = logits[:, :5001]  # with room for an aligned number of words
        if SOAK or dtype == half:
            cross_entropy_path.softmax_gradient(odd, labels, torch.ones(64), gradient)
        if SOAK:
            cross_entropy_path.part_sums(odd, labels)
            cross_entropy_path.part_gradient(odd, labels, torch.ones(64), torch.ones(64), labels == 0)
        forward_path.add_dropped({}, logits, logits, logits, torch.ones(5008), None)
        if importlib.util.find_spec("bitsandbytes") is not None:
            for nested in (False, True):
                from bitsandbytes.functional import quantize_4bit

                made = quantize_4bit(torch.ones(256, 64), quant_type="nf4", compress_statistics=nested)
                four_bit.computed(*made, dtype)
        dropping.masked(logits, torch.zeros(64, 2, dtype=torch.int32), 3, 0.1, scaled=gradient)
        for (at, D), (number, (offset, rounding)) in itertools.product(
            enumerate(RMS_NORMS), enumerate(KINDS_OF_RMS_NORMS)
        ):
            if SOAK or (at + number) % 2 == turn:  # every two of width, kind and dtype meet
                case = f"RMS norm, {D} features, {dtype}"
                x, scales = torch.zeros(64, D, dtype=dtype), torch.zeros(D, dtype=dtype)
                rms_norm_path.forward(x, scales, 1e-6, offset, rounding)
                rms_norm_path.backward(x, scales, x, 1e-6, offset)
    return list(rows.values())


if __name__ == "__main__":
    chosen = {name: MORE[name] for name in sys.argv[2:]} or USUAL
    print(json.dumps(captured(sys.argv[1] if len(sys.argv) > 1 else "90", chosen)))
