"""Fused RMS norms, and liger-kernel's rotary embedding and gated activations, on one loaded model. Optional: pip install
liger-kernel. The norms are ops/rms_norm's, whose backward makes no gradient of the frozen weight, as liger's does.

Parts are found by what they compute, not by the names of model classes: a module is taken over only if the kernel gives what
the module itself gives on random numbers. Only this model's modules change, never transformers' classes; linear layers
are looked up at every call, so adapters may be put on before or after. The loss is ops/cross_entropy's.

The kernels work in place: the rotary embedding overwrites its inputs in forward, the activation its inputs in backward. Both
are outputs of linear layers, so adapters/kept_outputs.py looks for forwards that are defined in this file.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from packlora.errors import InputError
from packlora.ops.rms_norm.reference import KINDS
from packlora.ops.rms_norm.rms_norm import WIDEST, rms_norm

ERROR = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Largest difference to the module's own result, relative to its largest value: rounding, not another formula."""
ROTARY = "apply_rotary_pos_emb"


def check_liger(setting: bool | Literal["auto"], device: torch.device, dtype: str) -> bool:
    """Whether liger may be used. Raises InputError if it must be and cannot."""
    why = None
    if setting is False:
        return False
    if importlib.util.find_spec("liger_kernel") is None:
        why = "liger-kernel is not installed; pip install 'packlora[liger]', or leave liger out"
    elif device.type != "cuda":
        why = f"its kernels run on a GPU, and this run is on {device}"
    elif getattr(torch, dtype) not in ERROR:
        why = f"its kernels compute in float32, which is not enough for {dtype}"
    if setting is True and why is not None:
        raise InputError(f"liger: true cannot be met: {why}")
    return why is None


@torch.no_grad()
def use_liger(
    model: PreTrainedModel, setting: bool | Literal["auto"], each: Callable[[Iterable[str]], Iterator[str]] = iter
) -> list[str]:
    """Replace parts of a loaded, frozen model by liger's kernels, in place.

    Args:
        each: of paths, while the weights of their modules are here (ops/lora_linear/storage.py).

    Returns:
        What was taken over, as `65 LlamaRMSNorm`; empty where liger is off or unavailable.

    Raises:
        InputError: setting is true and liger is unavailable, or has nothing for this model.
    """
    if not check_liger(setting, model.device, str(model.dtype).removeprefix("torch.")):
        return []
    counts: dict[str, int] = {}
    ops = importlib.import_module("liger_kernel.ops")
    known: dict[Any, Any] = {}  # results by class of norms or attentions
    like = torch.empty(0, dtype=model.dtype, device=model.device)  # weights may be codes
    for path in each([path for path, _ in model.named_modules()]):
        module = model.get_submodule(path)
        forward = _norm(module, known) or _gated(module, like, ops) or _rotary(module, like, known, ops)
        if forward is not None:
            module.forward = MethodType(forward, module)
            counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
    if setting is True and not counts:
        raise InputError(f"liger: true cannot be met: liger has nothing for a {model.config.model_type} model")
    return [f"{count} {name}" for name, count in counts.items()]


def _norm(module: Any, known: dict[Any, Any]) -> Callable[..., Any] | None:
    """RMSNorm with a frozen weight."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or weight.ndim != 1:
        return None
    if not isinstance(eps, float) or weight.requires_grad or len(weight) > WIDEST:
        return None
    if type(module) not in known:
        x, dy = _random(2, 3, 5, len(weight), like=weight)
        fused = {kind: partial(rms_norm, x, weight, eps, *kind) for kind in KINDS}
        errors = {kind: _error(fused[kind], partial(module, x)) for kind in KINDS}
        best = min(errors, key=lambda kind: errors[kind])
        of_gradient = _error(
            lambda: _gradient(lambda x: rms_norm(x, weight, eps, *best), x, dy), lambda: _gradient(module, x, dy)
        )
        known[type(module)] = best if max(errors[best], of_gradient) <= ERROR[weight.dtype] else None
    kind = known[type(module)]

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if self.weight.requires_grad or self.weight.dtype != hidden_states.dtype:
            return type(self).forward(self, hidden_states)
        return rms_norm(hidden_states, self.weight, eps, *kind)

    return None if kind is None else forward


def _gradient(function: Callable[..., torch.Tensor], x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, dy)[0]


def _gated(module: Any, like: torch.Tensor, ops: Any) -> Callable[..., Any] | None:
    """down(act(gate(x)) * up(x)) with SiLU, or with GELU in its tanh form. Each module is asked: a class has several kinds."""
    gate, up, down, act = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
    if not all(isinstance(part, torch.nn.Linear) for part in (gate, up, down)) or act is None:
        return None
    assert gate is not None and up is not None and down is not None
    x = _random(16, gate.in_features, like=like)
    if _error(partial(module, x), lambda: down(act(gate(x)) * up(x))) != 0:
        return None
    a, b = _random(2, 7, gate.out_features, like=like, scale=3)
    for function in (ops.LigerSiLUMulFunction, ops.LigerGELUMulFunction):
        if _error(partial(function.apply, a.clone(), b.clone()), lambda: act(a) * b) <= ERROR[a.dtype]:
            return _product_by(function)
    return None


def _product_by(function: Any) -> Callable[..., Any]:
    """The forward of a gated feed-forward whose activation is this autograd function."""
    return lambda self, x: self.down_proj(function.apply(self.gate_proj(x), self.up_proj(x)))


def _rotary(module: Any, like: torch.Tensor, known: dict[Any, Any], ops: Any) -> Callable[..., Any] | None:
    """An attention whose forward calls apply_rotary_pos_emb(q, k, cos, sin): the same code, with liger's in its place."""
    own, head = type(module).forward, getattr(module, "head_dim", 0)
    inner = inspect.unwrap(own, stop=lambda one: not isinstance(one, FunctionType))
    if not isinstance(inner, FunctionType) or ROTARY not in inner.__code__.co_names or ROTARY not in inner.__globals__:
        return None
    if head < 2 or head % 2:
        return None

    def rotate(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return ops.LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim)

    if type(module) not in known:
        known[type(module)] = None
        angles = 3 * _random(1, 5, head // 2, like=like).float().repeat(1, 1, 2)
        cos, sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
        q, k = (_random(1, 5, heads, head, like=like).transpose(1, 2) for heads in (4, 2))

        def rotated(function: Callable[..., Any]) -> torch.Tensor:
            return torch.cat([y.flatten() for y in function(q.clone(), k.clone(), cos, sin)])

        if _error(partial(rotated, rotate), partial(rotated, inner.__globals__[ROTARY])) <= ERROR[like.dtype]:
            patched = known[type(module)] = _calling(rotate, own)
            patched.__module__ = __name__  # marks it as a forward that calls liger
    found: Callable[..., Any] | None = known[type(module)]
    return found


def _calling(rotate: Callable[..., Any], own: FunctionType) -> FunctionType:
    """Copy a forward so that it calls `rotate`; the decorators around it, such as transformers' of renamed arguments, stay."""
    names, closure, inner = own.__globals__, own.__closure__, getattr(own, "__wrapped__", None)
    if inner is None:
        names = names | {ROTARY: rotate}
    else:
        copy = _calling(rotate, inner)
        closure = tuple(CellType(copy) if cell.cell_contents is inner else cell for cell in closure or ())
    made = FunctionType(own.__code__, names, own.__name__, own.__defaults__, closure)
    made.__kwdefaults__ = own.__kwdefaults__
    return made


def _random(*shape: int, like: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers of the device and dtype of `like`, drawn apart from every other random state."""
    generator = torch.Generator().manual_seed(0)
    return (scale * torch.randn(shape, generator=generator)).to(like.device, like.dtype)


def _error(compute: Callable[[], torch.Tensor], reference: Callable[[], torch.Tensor]) -> float:
    """Largest difference over the largest value; infinite where one of them cannot be computed or they do not compare."""
    try:
        got, want = compute().double(), reference().double()
        error = float((got - want).abs().max() / want.abs().max())
    except (RuntimeError, TypeError, ValueError):  # another signature, another layout
        return math.inf
    return error if got.shape == want.shape and not math.isnan(error) else math.inf
