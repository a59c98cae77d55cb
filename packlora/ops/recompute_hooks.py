"""Hooks on a model that say of norms and gated products how they are recomputed (recompute.py), and change nothing of what the
model computes.

    a product   is recomputed where autograd's record of the very forward that is running says that it is act(gate) * up, with
                nothing between: no dropout, no sparsity, no cast, no hook that changed a projection. Never assumed of a class,
                of another layer or of an earlier forward.
    a norm      is called again. It must have given the same bits twice, in train mode, and train no parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from packlora.ops.modules import put_hooks, undisturbed
from packlora.ops.recompute import RecomputeHooks, recomputable, recompute_of

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
GATED = ("gate_proj", "up_proj", "down_proj")
LIGER_PRODUCTS = ("LigerSiLUMulFunction", "LigerGELUMulFunction")
"""Autograd functions of liger_kernel that compute act(gate) * up."""
NOT_THE_PRODUCT = "down_proj reads something else than act(gate_proj) * up_proj, act being SiLU, GELU or ReLU"


def add_recompute(
    model: nn.Module, each: Callable[[Iterable[str]], Iterator[str]] = iter
) -> tuple[str, dict[str, str]]:
    """Put hooks on the RMS norms and gated feed-forwards of a model; they are taken off by their class.

    Args:
        each: of paths, while the weights of their modules are here (ops/lora_linear/storage.py).

    Returns:
        In words how many there are, and by path the reasons of those that are left alone.
    """
    left: dict[str, str] = {}
    norms = products = 0
    with undisturbed(model, training=True):
        for path in each([path for path, _ in model.named_modules()]):
            module = model.get_submodule(path)
            if type(module).__name__.endswith("RMSNorm"):
                if reason := _why_not_norm(module):
                    left[path] = reason
                else:
                    RecomputedNorm().attach(module)
                    norms += 1
            elif all(isinstance(getattr(module, name, None), nn.Module) for name in GATED):
                if reason := _why_not_product(module):
                    left[path] = reason
                else:
                    RecomputedProduct().attach(module)
                    products += 1
    return f"{norms} norms and {products} gated products are computed again in the backward, not kept", left


# --- norms -------------------------------------------------------------------------------------------------------------


class RecomputedNorm(RecomputeHooks):
    """A hook on one norm, which says of its outputs how they are recomputed."""

    def attach(self, norm: nn.Module) -> None:
        norm.register_forward_hook(self._made, prepend=True, with_kwargs=True)

    def _made(self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or len(args) != 1 or kwargs or not isinstance(output, torch.Tensor):
            return
        weights = tuple(norm.parameters(recurse=False))
        if any(weight.requires_grad for weight in weights):  # may have other values in the backward
            return
        # the weights are operands for autograd's check that nobody writes into them
        recomputable(output, partial(_called_again, norm.forward, _autocast(output)), args[0], *weights)


def _autocast(x: torch.Tensor) -> tuple[str, bool, torch.dtype]:
    kind = x.device.type
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _called_again(
    forward: Callable[[torch.Tensor], torch.Tensor], autocast: tuple[str, bool, torch.dtype], x: torch.Tensor, *_: Any
) -> torch.Tensor:
    if autocast == _autocast(x):
        return forward(x)
    kind, enabled, dtype = autocast
    with torch.autocast(kind, dtype, enabled):
        return forward(x)


def _why_not_norm(norm: nn.Module) -> str | None:
    """Reason why the output of a norm in train mode cannot be recomputed by calling it again; None where it can."""
    if any(parameter.requires_grad for parameter in norm.parameters()):
        return "it is trained itself"
    weight = next(norm.parameters(), None)
    shape = (3, 32) if weight is None else (3, weight.shape[-1])
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = x if weight is None else x.to(weight.device, weight.dtype)
    try:
        with torch.no_grad():
            first, second = norm.forward(x.clone()), norm.forward(x.clone())
            return None if torch.equal(first, second) else "gives other values when it is called again"
    except Exception as error:  # any module, any error: nothing is recomputed then
        return f"calling it failed ({type(error).__name__})"


# --- products ----------------------------------------------------------------------------------------------------------


class RecomputedProduct(RecomputeHooks):
    """Hooks on the projections of one gated feed-forward: see to what down_proj reads."""

    def __init__(self) -> None:
        self._gate: torch.Tensor | None = None
        self._up: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles keep no tensors."""
        return {"_gate": None, "_up": None}

    def attach(self, module: Any) -> None:
        module.gate_proj.register_forward_hook(self._made_gate)
        module.up_proj.register_forward_hook(self._made_up)
        module.down_proj.register_forward_pre_hook(self._read)
        put_hooks(module, self._drop, self._drop)

    def _drop(self, *_: Any) -> None:
        """Let go also where the forward fails: the two have the history of all layers before, whose memory is needed then."""
        if not torch.compiler.is_compiling():
            self._gate = self._up = None

    def _made_gate(self, _: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._gate = output

    def _made_up(self, _: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._up = output

    def _read(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        gate, up, self._gate, self._up = self._gate, self._up, None, None
        if len(args) == 1 and all(isinstance(tensor, torch.Tensor) for tensor in (args[0], gate, up)):
            assert gate is not None and up is not None
            function = product_of(args[0], gate, up)
            if function is not None:
                recomputable(args[0], function, gate, up)


def product_of(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Product | None:
    """The function of gate and up that made x, by autograd's record of how x was made; None where that does not say."""
    node, gate_node, up_node = x.grad_fn, gate.grad_fn, up.grad_fn
    if node is None or gate_node is None or up_node is None:
        return None
    gate_edge, up_edge = (gate_node, gate.output_nr), (up_node, up.output_nr)
    edges = node.next_functions
    if edges == (gate_edge, up_edge):
        function: Any = getattr(type(node), "_forward_cls", object)  # autograd functions in Python have it
        return function.apply if any(base.__name__ in LIGER_PRODUCTS for base in function.__mro__) else None
    if type(node).__name__ != "MulBackward0" or len(edges) != 2:
        return None
    for (act, _), other in (edges, edges[::-1]):
        if other == up_edge and act is not None and act.next_functions == (gate_edge,):
            return _activated(act)
    return None


def _activated(act: Any) -> Product | None:
    """act(gate) * up, for a node of autograd that stands for one elementwise operation."""
    name = type(act).__name__
    if name == "SiluBackward0":
        return _silu_mul
    if name == "GeluBackward0":
        return partial(_gelu_mul, act._saved_approximate)
    return _relu_mul if name == "ReluBackward0" else None


def _silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _times(F.silu(gate), up)


def _relu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _times(F.relu(gate), up)


def _gelu_mul(approximate: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _times(F.gelu(gate, approximate=approximate), up)


def _times(activated: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Multiply in place where nothing is broadcast or promoted, without a second tensor of that size."""
    alike = activated.shape == up.shape and activated.dtype == up.dtype
    return activated.mul_(up) if alike else activated * up


def _why_not_product(module: Any) -> str | None:
    """Reason why nothing can be recomputed in a forward of a gated feed-forward in train mode; None where it can: one of four
    tokens is looked at, with random numbers in the place of the projections, so that no weight is read."""
    read: list[bool] = []
    hooks = RecomputedProduct()

    def down(x: torch.Tensor) -> torch.Tensor:
        hooks._read(module, (x,))
        read.append(recompute_of(x) is not None)
        return x.new_zeros(*x.shape[:-1], K)

    def projection(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def project(x: torch.Tensor) -> torch.Tensor:
            y = x.new_empty(*x.shape[:-1], N).normal_().requires_grad_().clone()
            setattr(hooks, name, y)
            return y

        return project

    forwards = dict(zip(GATED, (projection("_gate"), projection("_up"), down), strict=True))
    kept = {name: getattr(module, name).__dict__.get("forward") for name in GATED}
    try:
        gate, weight = module.gate_proj, module.gate_proj.weight
        sized = (
            gate if hasattr(gate, "out_features") else getattr(gate, "base", None)
        )  # codes have another shape than W
        N = getattr(sized, "out_features", None) or weight.shape[0]
        K = getattr(sized, "in_features", None) or weight.shape[1]
        dtype = weight.dtype if weight.is_floating_point() else torch.float32
        for name, replaced in forwards.items():
            getattr(module, name).forward = replaced
        module(torch.zeros(1, 4, K, device=weight.device, dtype=dtype))
    except Exception as error:  # any module, any error: nothing is recomputed then
        return f"running it failed ({type(error).__name__})"
    finally:
        for name, forward in kept.items():
            getattr(module, name).__dict__.pop("forward", None)
            if forward is not None:
                getattr(module, name).forward = forward
    return None if read and all(read) else NOT_THE_PRODUCT
