"""`peers`: the linear layers of a decoder layer by packlora, PEFT, Unsloth, Axolotl and LoRAFusion.

    python -m benchmarks peers --out peers-h200.json
    python -m benchmarks peers --only T8192,p0,axolotl,peft_compiled --out peers.json     # words of cases, contenders

Other projects' kernels are fetched when they are first measured (peers/sources.py), peers/kernels.py puts them on PEFT's model.
Every way's results are compared with PEFT's in float32 before it is timed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from benchmarks.contenders import forget
from benchmarks.harness import Benchmark, Case, Options, Row, case, timed
from benchmarks.peers.kernels import BLOCK_PEERS, use_peer
from benchmarks.peers.sources import SOURCES, fetched
from benchmarks.shapes import SHAPES, TARGETS
from packlora.live.accelerate import accelerate
from packlora.tune.timing import Contender, Work

RANK, ALPHA = 16, 32
WITHOUT_DORA, WITHOUT_DROPOUT = ("unsloth", "lorafusion", "lorafusion_tma"), ("unsloth",)
"""Projects that leave such layers to PEFT's forward, so that their kernels would not be measured."""
TIMES_PEFT, LEAST = 3.0, 1e-5
"""A result is wrong, not rounded, where it is so many times as far from PEFT in float32 as PEFT in the same dtype is, and more
than LEAST."""


def cases(options: Options) -> list[Case]:
    """The most telling ones first."""
    settings = [(T, dropout, False) for dropout in (0.0, 0.1) for T in (8192, 2048)] + [(8192, 0.0, True)]
    if options.tiny:
        settings = [(32, 0.0, False)]
    return [
        case(f"block T{T} p{dropout:g} {'dora' if dora else 'lora'}", T=T, dropout=dropout, dora=dora, r=RANK)
        for T, dropout, dora in (settings[:1] if options.quick else settings)
    ]


# --- the block ---------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class Out(nn.Module):
    o_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(x)  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """product: of gate and up."""

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.product(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


def plain_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(gate) * up


def liger_swiglu(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Liger's product; None where it is not installed or has no GPU."""
    if device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return None
    apply: Any = importlib.import_module("liger_kernel.ops").LigerSiLUMulFunction.apply
    return lambda gate, up: apply(gate, up)


class Block(nn.Module):
    """Three parts side by side, with an input each; outputs in one tuple."""

    def __init__(self, weights: dict[str, nn.Parameter], product: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attention, self.out, self.mlp = Attention(), Out(), Mlp()
        self.mlp.product = product
        owners: tuple[nn.Module, ...] = (self.attention,) * 3 + (self.out,) + (self.mlp,) * 3
        for owner, name in zip(owners, TARGETS, strict=True):
            N, K = weights[name].shape
            linear = nn.Linear(K, N, bias=False, device="meta")
            linear.weight = weights[name]
            owner.add_module(name, linear)

    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*self.attention(a), self.out(b), self.mlp(c))


class Data:
    """Weights and adapters of the block; inputs and upstream gradients of a case."""

    def __init__(self, device: torch.device) -> None:
        gpu = device.type == "cuda"
        self.device, self.dtype = device, torch.bfloat16 if gpu else torch.float32
        hidden = SHAPES["Llama-3.1-8B"]["hidden_size"] if gpu else 256
        narrow, inner = (hidden // 4, SHAPES["Llama-3.1-8B"]["intermediate_size"]) if gpu else (256, 512)
        widths = dict(zip(TARGETS, (hidden, narrow, narrow, hidden, inner, inner, hidden), strict=True))
        self.generator = torch.Generator(device).manual_seed(0)
        self.weights, self.A, self.B = {}, {}, {}
        for name, N in widths.items():
            K = inner if name == "down_proj" else hidden
            self.weights[name] = nn.Parameter(self._draw((N, K), K**-0.5), requires_grad=False)
            self.A[name], self.B[name] = self._draw((RANK, K), K**-0.5), self._draw((N, RANK), 0.02)
        self.hidden, self.outputs = hidden, (*(widths[name] for name in TARGETS[:4]), hidden)

    def _draw(self, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=self.device, generator=self.generator) * scale).to(self.dtype)

    def tokens(self, T: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Inputs and upstream gradients, four samples each."""
        inputs = [self._draw((4, T // 4, self.hidden)) for _ in range(3)]
        return inputs, [self._draw((4, T // 4, width)) for width in self.outputs]


def peft_block(
    data: Data, case: Case, dropout: float, dtype: torch.dtype, product: Any
) -> tuple[Any, list[nn.Parameter]]:
    """A PEFT model around a block with the data's adapters, and what it trains."""
    weights = {name: nn.Parameter(weight.to(dtype), requires_grad=False) for name, weight in data.weights.items()}
    block = Block(data.weights if dtype == data.dtype else weights, product)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=dropout, target_modules=TARGETS, use_dora=case.dora)
    with data.device:
        model: Any = get_peft_model(block, config, autocast_adapter_dtype=False).train()
    with torch.no_grad():
        for path, module in model.named_modules():
            name = path.rpartition(".")[2]
            if name in data.A and hasattr(module, "lora_A"):
                module.lora_A["default"].weight.data = data.A[name].to(dtype, copy=True)
                module.lora_B["default"].weight.data = data.B[name].to(dtype, copy=True)
                if case.dora:
                    W = data.weights[name].float() + ALPHA / RANK * data.B[name].float() @ data.A[name].float()
                    magnitude = (W.norm(dim=1) * torch.linspace(0.95, 1.05, len(W), device=W.device)).to(data.dtype)
                    module.lora_magnitude_vector["default"].weight.data = magnitude.to(dtype)
    return model, [parameter for parameter in model.parameters() if parameter.requires_grad]


def built(name: str, data: Data, case: Case, dropout: float) -> tuple[Any, list[nn.Parameter], str]:
    """Make a contender: the module to call, the parameters that it trains, and a note.

    Raises:
        AssertionError: packlora left a module to PEFT.
    """
    product = liger_swiglu(data.device) or plain_swiglu
    if name == "frozen":
        return Block(data.weights, product).train(), [], ""
    compiled = name == "peft_compiled"
    model, parameters = peft_block(data, case, dropout, data.dtype, plain_swiglu if compiled else product)
    inner, note = model.base_model.model, ""
    if name.startswith("packlora"):
        example = dict(zip("abc", (x[:1, :2] for x in data.tokens(8)[0]), strict=True))
        report = accelerate(model, example=example, recompute=name == "packlora_recompute")
        assert report.accelerated == len(report.modules), f"modules were left to PEFT: {report}"
        note = f"{sorted({str(module.plan) for module in report.modules})}, {len(report.groups)} sibling groups"
    elif compiled:
        inner = torch.compile(inner, backend="inductor" if data.device.type == "cuda" else "eager", dynamic=False)
    elif name != "peft_bf16":
        use_peer(name, inner)
    return inner, parameters, note


# --- right and timed ---------------------------------------------------------------------------------------------------


def results(
    call: Any, parameters: Sequence[nn.Parameter], inputs: list[torch.Tensor], grads: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Outputs, gradients of inputs and of parameters, float32."""
    own = [x.clone().requires_grad_() for x in inputs]
    outputs = call(*own)
    found = [y.detach().float().clone() for y in outputs]
    torch.autograd.backward(outputs, [d.clone() for d in grads])
    for tensor in (*own, *parameters):
        assert tensor.grad is not None, "a gradient is missing"
        found.append(tensor.grad.float().clone())
        tensor.grad = None
    return found


def distance(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest relative Frobenius distance."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


class Right:
    """Compares ways with PEFT in float32, on few tokens and without dropout."""

    def __init__(self, data: Data, case: Case) -> None:
        self.data, self.case = data, case
        self.inputs, self.grads = data.tokens(256 if data.device.type == "cuda" else 16)
        model, parameters = peft_block(data, case, 0.0, torch.float32, plain_swiglu)
        wide = [[tensor.float() for tensor in own] for own in (self.inputs, self.grads)]
        self.expected = results(model.base_model.model, parameters, *wide)
        self.bound = max(LEAST, TIMES_PEFT * self.error("peft_bf16"))

    def error(self, name: str) -> float:
        call, parameters, _ = built(name, self.data, self.case, 0.0)
        return distance(results(call, parameters, self.inputs, self.grads), self.expected)

    def check(self, name: str) -> float:
        """Raises AssertionError for a way whose results are wrong."""
        error = self.error(name)
        assert error <= self.bound, f"{error:.2g} from PEFT in float32, {self.bound:.2g} is rounding"
        return error


def work(
    name: str, data: Data, case: Case, tokens: tuple[list[torch.Tensor], list[torch.Tensor]], right: Right,
    errors: dict[str, float],
) -> Work:  # fmt: skip
    """A contender that is checked, but for PEFT compiled, which would be compiled twice. errors: its own is put there."""
    if name not in ("frozen", "peft_compiled"):
        errors[name] = right.check(name)
    call, parameters, note = built(name, data, case, case.dropout)
    originals, grads = tokens
    inputs = [x.clone().requires_grad_() for x in originals]

    def step() -> None:
        torch.autograd.backward(call(*inputs), grads)

    def clear() -> None:
        for x, original in zip(inputs, originals, strict=True):
            x.grad = None
            x.data.copy_(original)  # some write their gradient into it
        for parameter in parameters:
            parameter.grad = None

    return Work(step, clear, note)


def taking_part(one: Case, names: Sequence[str]) -> list[str]:
    """Leave out contenders that would leave the case to PEFT's forward."""
    without = {*(WITHOUT_DORA if one.dora else ()), *(WITHOUT_DROPOUT if one.dropout else ())}
    return [name for name in names if name not in without]


def measure(one: Case, names: list[str], options: Options) -> Row:
    """Raises InputError where the sources of a project are not here and cannot be fetched."""
    if options.tiny:
        names = [name for name in names if not name.startswith(("lorafusion", "unsloth"))]  # their kernels need a GPU
    for name in SOURCES:
        if any(contender.startswith(name) for contender in names):
            fetched(name)
    data: Data = options.shared("block", lambda: Data(options.device))
    right, errors, tokens = Right(data, one), dict[str, float](), data.tokens(one.T)
    contenders = [
        Contender(name, partial(work, name, data, one, tokens, right, errors)) for name in taking_part(one, names)
    ]
    row = timed(contenders, options, seconds=2.0, rounds=(9, 60), ahead=True, wall=True)
    del contenders
    forget(options.device)
    return row | {"error": errors}


def summary(rows: Sequence[Row]) -> Row:
    """Figures by case: every contender's time over frozen, of the GPU alone where that was measured, and on the wall."""
    out: Row = {}
    for row in rows:
        key = row["case"].replace("block ", "").replace(" ", "_")
        for kind, name in (("ahead_over_frozen", "gpu"), ("wall_over_frozen", "wall")):
            out |= {f"{contender}_{key}_over_frozen_{name}": ratio for contender, ratio in row.get(kind, {}).items()}
    return out


PEERS = Benchmark(
    cases, measure, summary,
    "q, k, v, o, gate, up and down of a decoder layer of Llama-3.1-8B's shape, random bfloat16 weights: q, k, v on "
    "one input, o on another, gate, up and down with SwiGLU (liger's where it is installed, else torch's, for all "
    "but Unsloth and Axolotl, which have their own, and PEFT compiled) on a third; T tokens each, forward and "
    "backward from random upstream gradients. frozen: no adapter, forward and gradients of inputs. LoRA or DoRA r "
    f"{RANK}, alpha {ALPHA}, adapters in the weights' dtype, B not zero; p: dropout. packlora: packlora.accelerate "
    "on the PEFT model (_recompute: with recompute=True); peft_compiled: torch.compile; "
    f"{', '.join(f'{name} {source.commit[:7]}' for name, source in SOURCES.items())}. Kernels of other projects are "
    "their own files at these commits; lorafusion is without TMA, lorafusion_tma with its TMA forward through "
    "Triton's present descriptors. Contenders run in turn inside one loop, random order each round, L2 flushed, "
    "inputs restored before each run; medians, ratios within a round. ahead_: the GPU alone, wall_: each run waited "
    "for. error: largest relative Frobenius distance of outputs and gradients to PEFT in float32, without dropout.",
    ["frozen", "packlora", "packlora_recompute", "peft_bf16", "peft_compiled", *BLOCK_PEERS], by_case=True,
)  # fmt: skip
