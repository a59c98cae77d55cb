"""Recipes (ops/recipe.py) for what adapted layers read: outputs of RMS norms, and the product inside gated feed-forwards.

Everything is done by hooks on the modules, which change nothing of what they compute. A function is taken for a gated
feed-forward's product only if it gives the very bits of the module's own on random numbers.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from packlora.adapters.siblings import undisturbed
from packlora.ops.recipe import attach

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
GATED = ("gate_proj", "up_proj", "down_proj")


def add_recipes(model: nn.Module) -> tuple[list[Any], str]:
    """Put hooks on the norms and gated feed-forwards of a model.

    Returns:
        Handles whose remove() takes them off again, and in words what was found.
    """
    handles: list[Any] = []
    known: dict[Any, Product | None] = {}
    norms = products = 0
    for module in list(model.modules()):
        if type(module).__name__.endswith("RMSNorm"):
            handles.append(module.register_forward_hook(_norm))
            norms += 1
        elif all(isinstance(getattr(module, name, None), nn.Module) for name in GATED):
            key = type(module), type(getattr(module, "act_fn", None)), getattr(module.forward, "__func__", None)
            if key not in known:
                known[key] = _product(module)
            if (function := known[key]) is not None:
                handles += _gated(module, function)
                products += 1
    return handles, f"{norms} norms and {products} gated products are computed again in the backward, not kept"


def _norm(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if len(args) == 1 and isinstance(output, torch.Tensor):
        attach(output, module.forward, args[0])


def _gated(module: Any, function: Product) -> list[Any]:
    made: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled() and isinstance(output, torch.Tensor):
                made[name] = output

        return hook

    def read(_: nn.Module, args: tuple[Any, ...]) -> None:
        gate, up = made.pop("gate", None), made.pop("up", None)
        if gate is not None and up is not None and len(args) == 1 and args[0].shape == gate.shape:
            attach(args[0], function, gate, up)

    return [
        module.gate_proj.register_forward_hook(keep("gate")), module.up_proj.register_forward_hook(keep("up")),
        module.down_proj.register_forward_pre_hook(read),
    ]  # fmt: skip


def _product(module: Any) -> Product | None:
    """The function of gate and up whose bits are those that down_proj reads."""
    seen: dict[str, torch.Tensor] = {}
    handles = [
        module.gate_proj.register_forward_hook(lambda _, args, output: seen.update(gate=output.clone())),
        module.up_proj.register_forward_hook(lambda _, args, output: seen.update(up=output.clone())),
        module.down_proj.register_forward_pre_hook(lambda _, args: seen.update(product=args[0].clone())),
    ]
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    width = getattr(module.gate_proj, "in_features", 0) or module.gate_proj.weight.shape[1]
    try:
        with undisturbed(module):
            module(torch.randn(16, width, generator=generator).to(weight.device, weight.dtype)[None])
    except Exception:  # takes something else: no recipe
        return None
    finally:
        for handle in handles:
            handle.remove()
    if seen.keys() != {"gate", "up", "product"}:
        return None
    candidates: list[Product] = []
    if (
        weight.is_cuda and importlib.util.find_spec("liger_kernel") is not None
    ):  # first: one kernel where torch needs two
        ops = importlib.import_module("liger_kernel.ops")
        candidates += [ops.LigerSiLUMulFunction.apply, ops.LigerGELUMulFunction.apply]
    act = getattr(module, "act_fn", None)
    if isinstance(act, nn.Module) and not list(act.parameters()):
        candidates.append(lambda gate, up: act(gate) * up)
    candidates.append(lambda gate, up: nn.functional.silu(gate) * up)
    for function in candidates:
        try:
            with torch.no_grad():
                made = function(seen["gate"].clone(), seen["up"].clone())
            if torch.equal(made, seen["product"]):
                return function
        except (RuntimeError, TypeError, ValueError):
            continue
    return None
