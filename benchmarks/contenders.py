"""Contenders: a frozen layer or model, packlora's ways and PEFT's over the same weights, inputs and adapter values.

Without dropout packlora's results are compared with PEFT's before its time counts. Shapes: T tokens as [4, T / 4], K inputs,
N outputs, r rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from benchmarks.harness import plan_of
from benchmarks.peers.dora import PaperLayer, dense_norm
from benchmarks.shapes import TARGETS, shared_copy
from packlora.adapters.norms import NormHandle, RowNorms
from packlora.engine.memory import free_memory, synchronize
from packlora.live.accelerate import accelerate
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.types import Layer, LowRank, Segment
from packlora.plans.select import PlanChooser
from packlora.tune.timing import Contender, Work

LARGEST_DIFFERENCE = 0.02
"""Relative Frobenius distance to PEFT in bfloat16 (unit roundoff 0.004) beyond which a result is wrong, not rounded."""
WIDE = ("packlora_fp32", "peft_fp32_autocast", "peft_fp32_adapters", "peft_fp32")
"""Contenders with float32 adapters, PEFT's default."""
SCALING = 2.0
Call = Callable[..., torch.Tensor]


# --- one layer ---------------------------------------------------------------------------------------------------------


def stepped(work: Work, parameters: Iterable[torch.Tensor]) -> Work:
    """The work with other values in the parameters before each run, outside the clock, as an optimizer step leaves them.

    What is kept of the old values, by version or by value, is stale then. Matrices change sign once between two runs, however
    often gradients are dropped there, so that nothing drifts and A and B have the product that they had.
    """
    matrices, ran = [parameter for parameter in parameters if parameter.ndim > 1], False

    def step() -> None:
        nonlocal ran
        ran = True
        work.step()

    def clear() -> None:
        nonlocal ran
        work.clear()
        if ran:
            ran = False
            with torch.no_grad():
                torch._foreach_neg_(matrices)

    return Work(step, clear, work.note)


class One(nn.Module):
    """A model of one linear layer, for PEFT to wrap."""

    def __init__(self, weight_NK: nn.Parameter) -> None:
        super().__init__()
        self.linear = nn.Linear(weight_NK.shape[1], weight_NK.shape[0], bias=False, device="meta")
        self.linear.weight = weight_NK

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors that all contenders of a layer share: random and dense, B not zero. x is a leaf that wants a gradient.
    magnitude_N is 2 % away from the norms of the rows (None: LoRA)."""

    x: torch.Tensor
    dy: torch.Tensor
    weight_NK: nn.Parameter
    A_rK: torch.Tensor
    B_Nr: torch.Tensor
    dropout: float
    magnitude_N: torch.Tensor | None = None

    @staticmethod
    def random(
        K: int, N: int, T: int, r: int, dropout: float, device: torch.device, dora: bool = False
    ) -> Inputs:  # fmt: skip
        torch.manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, device=device) * scale).to(torch.bfloat16)

        x = draw(4, T // 4, K).requires_grad_()
        weight = nn.Parameter(draw(N, K, scale=K**-0.5), requires_grad=False)
        A, B = draw(r, K, scale=K**-0.5), draw(N, r, scale=0.02)
        return Inputs(x, draw(4, T // 4, N), weight, A, B, dropout, magnitudes(weight, A, B) if dora else None)

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        """A, B and, of DoRA, the magnitude."""
        return (self.A_rK, self.B_Nr) if self.magnitude_N is None else (self.A_rK, self.B_Nr, self.magnitude_N)


def magnitudes(weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor) -> torch.Tensor:
    """Norms of the rows of W + s B A, moved by 2 % as training does; values that bfloat16 holds."""
    norm_N = dense_norm(weight_NK.float(), A_rK.float(), B_Nr.float(), SCALING)
    return (norm_N * (1 + 0.02 * torch.randn_like(norm_N))).bfloat16().float()


def peft_layer(
    weight_NK: nn.Parameter, factors: Sequence[torch.Tensor], dropout: float, wide: bool
) -> tuple[Any, One, list[nn.Parameter]]:
    """A PEFT model of one layer with the given A, B and, for DoRA, magnitude.

    Args:
        wide: float32 adapter parameters; else the weight's type.

    Returns:
        The PEFT model, the module inside to call, and the parameters that train, in the order of the factors.
    """
    rank = len(factors[0])
    config = LoraConfig(
        r=rank,
        lora_alpha=int(SCALING * rank),
        lora_dropout=dropout,
        target_modules=["linear"],
        use_dora=len(factors) == 3,
    )
    model = get_peft_model(One(weight_NK), config, autocast_adapter_dtype=wide).train()
    layer = model.base_model.model.linear
    own = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    own += [layer.lora_magnitude_vector["default"].weight] if len(factors) == 3 else []
    with torch.no_grad():
        for parameter, value in zip(own, factors, strict=True):
            parameter.copy_(value)
    return model, model.base_model.model, own


def work(call: Call, x: torch.Tensor, dy: torch.Tensor, parameters: Iterable[torch.Tensor], note: str = "") -> Work:
    """One forward, and the backward from dy."""
    parameters = list(parameters)

    def step() -> None:
        call(x).backward(dy)

    def clear() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return Work(step, clear, note)


def check_close(call: Call, parameters: Sequence[torch.Tensor], other: Call, theirs: Sequence[torch.Tensor], x: torch.Tensor,
                dy: torch.Tensor, rows: slice | None = None) -> None:  # fmt: skip
    """Compare y, dx and the gradients of parameters with those of another way.

    Args:
        rows: tokens on which the other way runs; None: all.

    Raises:
        AssertionError: a relative Frobenius distance is larger than rounding can make it: the time would mean nothing.
    """
    part = slice(None) if rows is None else rows
    y = call(x)
    dx, *grads = torch.autograd.grad(y, [x, *parameters], dy)
    alone = x[part].detach().requires_grad_()
    expected_y = other(alone)
    expected = [expected_y, *torch.autograd.grad(expected_y, [alone, *theirs], dy[part])]
    for name, own, right in zip(("y", "dx", "dA", "dB", "dm"), [y[part], dx[part], *grads], expected, strict=False):
        distance = float((own.detach().float() - right.detach().float()).norm() / right.detach().float().norm())
        if not distance <= LARGEST_DIFFERENCE:
            raise AssertionError(
                f"{name} differs from PEFT's by {distance:.2g}, at most {LARGEST_DIFFERENCE} is rounding"
            )


def under_autocast(call: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def wrapped(x: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return call(x)

    return wrapped


def accelerated(name: str, model: Any, example: dict[str, Any] | None = None) -> str:
    """Give the model to packlora.accelerate, with the plan that the contender names; returns its report in short.

    Raises:
        AssertionError: a module was left to PEFT, so that the time would not be packlora's.
    """
    little = name == "packlora_recompute"
    report = accelerate(model, plan=plan_of(name), example=example, recompute=little, keep_outputs=little)
    if report.accelerated < len(report.modules):
        raise AssertionError(f"not all modules were accelerated: {report}")
    plans = ", ".join(sorted({str(module.plan) for module in report.modules}))
    grouped = sum(len(group) for group in report.groups)
    return "; ".join([f"plan {plans}, {grouped} of {len(report.modules)} modules in sibling groups", *report.notes])


def layer_work(
    name: str,
    inputs: Inputs,
    in_mode: Callable[[Call], Call] = lambda call: call,
    checks: list[Callable[[], None]] | None = None,
) -> Work:
    """One linear layer by the name of a contender.

    Args:
        name: frozen; packlora, packlora_stepped, packlora_fp32 or packlora:PLAN, all by `accelerate`; peft_bf16,
            peft_compiled, or one of WIDE; operator, operator_stepped or operator_low_rank, as training calls it; paper.
        in_mode: compiles the call.
        checks: the comparison with PEFT is put there, to be made once the call is compiled; None: it is made here.
    """
    x, dy, weight = inputs.x, inputs.dy, inputs.weight_NK
    if name == "frozen":
        return work(in_mode(One(weight)), x, dy, [])
    if name == "paper":
        paper = PaperLayer(weight, inputs.A_rK, inputs.B_Nr, inputs.magnitude_N, SCALING)  # type: ignore[arg-type]
        return _checked(paper, [paper.A, paper.B, paper.magnitude], inputs)
    if name.startswith("operator"):
        runs = [(0, x.shape[0] * x.shape[1], inputs.dropout)]
        call, own, note = operator(
            weight, [inputs.factors], runs, x.reshape(-1, x.shape[-1]), name != "operator_low_rank"
        )
        made = _checked(call, own, inputs, note)
        return stepped(made, own) if name == "operator_stepped" else made
    if name == "peft_fp32":
        weight = nn.Parameter(weight.float(), requires_grad=False)
        x, dy = x.detach().float().requires_grad_(), dy.float()
    model, one, parameters = peft_layer(weight, inputs.factors, inputs.dropout, name in WIDE)
    if name.startswith("packlora"):
        note = accelerated(name, model, {"x": x.detach()[:1, :2]})
        made = _checked(in_mode(one), parameters, inputs, note, name not in WIDE, checks)
        return stepped(made, parameters) if name == "packlora_stepped" else made
    call = in_mode(one)
    if name == "peft_compiled":
        torch._dynamo.reset()  # else its limit of recompilations makes later cases run uncompiled
        call = torch.compile(one)
    elif name == "peft_fp32_autocast":
        call = under_autocast(one, x.device)
    return work(call, x, dy, parameters)


def _checked(
    call: Call, parameters: Sequence[torch.Tensor], inputs: Inputs, note: str = "", compared: bool = True,
    checks: list[Callable[[], None]] | None = None,
) -> Work:  # fmt: skip
    """The work, once its results are PEFT's. With dropout both draw their own masks, and nothing is compared."""

    def check() -> None:
        _, one, own = peft_layer(inputs.weight_NK, inputs.factors, 0.0, wide=False)
        check_close(call, parameters, one, own, inputs.x, inputs.dy)

    if compared and not inputs.dropout:
        check() if checks is None else checks.append(check)
    return work(call, inputs.x, inputs.dy, parameters, note)


def operator(
    weight_NK: nn.Parameter, factors: Sequence[Sequence[torch.Tensor]], runs: Sequence[tuple[int, int, float]],
    x_TK: torch.Tensor, parity: bool = True, dtype: torch.dtype = torch.float32, name: str = "",
) -> tuple[Call, list[torch.Tensor], str]:  # fmt: skip
    """packlora's operator on one layer as training calls it: own parameters, and norms that follow them.

    Args:
        factors: A, B and, of DoRA, the magnitude, of each adapter.
        runs: start, stop and dropout of each adapter's tokens.
        x_TK: the tokens, for the choice of a plan where `name` has none.
        parity: dropout as PEFT has it.

    Returns:
        The call for x [..., K], all parameters, and a note on the plan.
    """
    norms, parameters, adapters = RowNorms(), [], {}
    for number, values in enumerate(factors):
        own = [value.detach().to(dtype, copy=True).requires_grad_() for value in values]
        parameters += own
        get = NormHandle(norms, weight_NK, own[0], own[1], SCALING, version_counted=True).get if len(own) == 3 else None
        adapters[number] = LowRank(own[0], own[1], SCALING, own[2] if len(own) == 3 else None, get)
    layers = (
        Layer(Dense(weight_NK), None, adapters, keep_output=len(factors[0]) == 3),
    )  # no one writes into the output
    segments = tuple(Segment(number, *run, base_dropped=parity) for number, run in enumerate(runs))
    keys_T2 = torch.randint(-(2**31), 2**31, (len(x_TK), 2), device=x_TK.device).to(torch.int32)
    plan = plan_of(name) or PlanChooser(x_TK.device).plan_of(x_TK, layers, segments)
    state = GroupState(version_counted=True)  # as in training: an optimizer moves version counters

    def call(x: torch.Tensor) -> torch.Tensor:
        return lora_group(x, layers, segments, keys_T2, 1, plan, state)[0]

    return call, parameters, f"plan {plan.name}"


# --- a model -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def away_from_start(adapted: Any) -> Any:
    """The PEFT model with B not zero and magnitudes not the norms of the weights."""
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.002)
        elif "lora_magnitude" in name:
            parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
    return adapted


def with_adapter(model: Any, rank: int, dropout: float, wide: bool, dora: bool, targets: Any = TARGETS) -> Any:
    """The model under PEFT, LoRA or DoRA on all linear layers, away from its start. wide: float32 adapters."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=dropout, target_modules=targets, use_dora=dora)
    with next(model.parameters()).device:  # a billion numbers are drawn in seconds by one core, in none by the GPU
        return away_from_start(get_peft_model(model, config, autocast_adapter_dtype=wide).train())


def adapted_copy(
    name: str, base: nn.Module, rank: int, dropout: float, prepare: Callable[[Any], None] = lambda model: None,
    example: dict[str, Any] | None = None, dora: bool = False,
) -> tuple[Any, str]:  # fmt: skip
    """The module of a contender over the weights of `base`, and packlora's note on it.

    Args:
        name: frozen, packlora, packlora_recompute, packlora_fp32, packlora_stepped, packlora:PLAN, peft_bf16 or
            peft_fp32_autocast.
        prepare: done to the model before packlora sees it.
    """
    model = shared_copy(base)
    if name != "frozen":
        model = with_adapter(model, rank, dropout, name in WIDE, dora)
    prepare(model)
    return model, accelerated(name, model, example) if name.startswith("packlora") else ""


def causal_lm(
    name: str, base: nn.Module, ids_BS: torch.Tensor, rank: int, dropout: float, checkpointing: bool = False,
    dora: bool = False, loss_tokens: int = 0, label: str = "",
) -> Contender:  # fmt: skip
    """A causal language model with labels, by the names of `adapted_copy`.

    Args:
        loss_tokens: the loss is on so many tokens at the end of each sample; 0 is all of them.
        label: the contender's name in the row, where it is another one.
    """

    def prepare(model: Any) -> None:
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()

    def make() -> Work:
        model, note = adapted_copy(name, base, rank, dropout, prepare, dora=dora)
        labels_BL = ids_BS[:, -loss_tokens:]

        def forward(ids_BS: torch.Tensor) -> torch.Tensor:
            out = model(input_ids=ids_BS, labels=labels_BL, logits_to_keep=loss_tokens, use_cache=False)
            return out.loss  # type: ignore[no-any-return]

        call = under_autocast(forward, ids_BS.device) if name == "peft_fp32_autocast" else forward
        made = Work(lambda: call(ids_BS).backward(), lambda: model.zero_grad(set_to_none=True), note)
        return stepped(made, [p for p in model.parameters() if p.requires_grad]) if name == "packlora_stepped" else made

    return Contender(label or name, make)


# --- torch.compile -----------------------------------------------------------------------------------------------------

MODES = ("eager", "compiled", "reduce-overhead")
"""Ways to run a module: as it is, under torch.compile, and with CUDA graphs that torch.compile records."""
RUNS = 3
"""Runs until nothing is compiled or recorded any more."""


def modes(device: torch.device) -> tuple[str, ...]:
    return MODES if device.type == "cuda" else MODES[:2]


def compiling(mode: str, device: torch.device) -> dict[str, Any]:
    """Arguments of torch.compile. On a CPU `compiled` stops once the graph is traced."""
    if device.type != "cuda":
        return {"backend": "eager", "dynamic": False}
    return {"mode": mode if mode == "reduce-overhead" else None, "dynamic": False}


def in_mode(call: Call, mode: str, device: torch.device) -> Call:
    return call if mode == "eager" else torch.compile(call, **compiling(mode, device))


def begin_step(mode: str) -> None:
    """Call before each forward: results that graphs gave before are not needed any more."""
    if mode == "reduce-overhead":
        torch.compiler.cudagraph_mark_step_begin()


def started(
    name: str, make: Callable[[list[Callable[[], None]]], Work], mode: str, device: torch.device, seconds: dict[str, float]
) -> Contender:  # fmt: skip
    """A contender in a mode, which is run until it is compiled, then compared by the checks that `make` leaves in its list.

    Args:
        seconds: how long compiling took is put there.
    """

    def build() -> Work:
        checks: list[Callable[[], None]] = []
        made, start = make(checks), time.perf_counter()

        def step() -> None:
            begin_step(mode)
            made.step()

        for _ in range(RUNS if mode != "eager" else 0):
            made.clear()
            step()
        made.clear()
        synchronize(device)
        if mode != "eager":
            seconds[name] = time.perf_counter() - start
        for check in checks:
            check()
        return Work(step, made.clear, made.note)

    return Contender(name, build)


def forget(device: torch.device) -> None:
    """Drop everything compiled, so that limits of recompilation do not leave later cases uncompiled, and its memory."""
    torch._dynamo.reset()
    free_memory(device)
