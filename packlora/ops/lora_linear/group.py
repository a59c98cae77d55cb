"""A group of frozen linear layers that read the same tokens, with the LoRA and DoRA adapters on them, for autograd.

    y_j = g_j (x W_j' + s_j drop(x) A_j' B_j') + bias_j         for every layer j of the group and the token's own adapter

x is read once for the S of all layers, saved once, and gets one gradient. Saved beside it: S, [T, sum of the ranks], and for
layers with a DoRA adapter z, the product that the magnitude's gradient needs (or nothing, where y can be read again). No mask
and no dropped copy of x: all layers of a group share one mask, that of the tensor they read, recomputed from its counters.

It is one autograd node, or two where saved tensors go through hooks, as under checkpointing: see `Outputs`.

This file owns the operands, their checks and autograd; steps.py computes. Plans for one LoRA adapter that merge weights or
associate otherwise are in products.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from packlora.ops.first_order import first_order
from packlora.ops.gpu import on_device
from packlora.ops.lora_linear.layout import (
    Layer,
    Layout,
    LowRank,
    Packed,
    Recent,
    Run,
    make_group_tables,
    make_layout,
    situation,
)
from packlora.ops.lora_linear.plan import CHAIN, Plan, legal
from packlora.ops.lora_linear.steps import HAS_TRITON, Composition, Steps
from packlora.ops.recompute import Recompute, recomputed

__all__ = ["HAS_TRITON", "GroupState", "Layer", "LowRank", "Run", "lora_group"]

_LAYOUTS: Recent[Layout] = Recent(4096)


_REFRESHING = threading.RLock()
"""Two threads that first use one layer must not both make its buffers."""


class GroupState:
    """What one caller keeps between its calls: packed operands and tables of the layers that it last passed.

    trusted: parameters change only in ways that the host can see (ops/stamp.py), so what is prepared from them is refreshed
    only then. Otherwise it is refreshed at every call.
    """

    def __init__(self, trusted: bool = False) -> None:
        self.trusted = trusted
        self._prepared: dict[bool, Prepared] = {}
        self._plan: Plan | None = None
        self._kernels = False
        self.layers: tuple[Layer, ...] = ()
        """Those passed last; a caller that passes the same objects again is served faster."""

    def prepared(self, x_TK: torch.Tensor, layers: tuple[Layer, ...], plan: Plan) -> Prepared:
        if plan is not self._plan:
            self._plan, self._kernels = plan, plan.needs_triton
        kernels = self._kernels
        self.layers = layers
        found = self._prepared.get(kernels)
        if found is None or not found.fits(x_TK, layers):
            with torch.inference_mode(False):  # what is kept is written to in training too
                found = self._prepared[kernels] = Prepared(x_TK, layers, kernels, self.trusted)
        return found


class Prepared:
    """Checked layers with their layout, packed operands and tables.

    A backward takes the packed operands and scales of its own forward. Where another forward has made them anew since, it takes
    those of the parameters as they are by then. So weights that are swapped through .data for another forward and swapped back,
    as by a mean teacher, make no difference. (What is not swapped back is a mixture, in PEFT of other parts.)
    """

    def __init__(self, x_TK: torch.Tensor, layers: tuple[Layer, ...], kernels: bool, trusted: bool) -> None:
        check_layers(x_TK, layers)
        self.layers, self.dtype, self.device, self.K = layers, x_TK.dtype, x_TK.device, x_TK.shape[1]
        self.kernels, self.trusted = kernels, trusted
        ranks = tuple(tuple((number, low.rank) for number, low in layer.adapters.items()) for layer in layers)
        sizes = tuple(len(layer.weight) for layer in layers)
        align = 16 if kernels else 1
        self.layout = _LAYOUTS.get(
            (ranks, sizes, align), lambda: make_layout([dict(own) for own in ranks], sizes, align)
        )
        self.packed = Packed(self.layout, self.K, x_TK.dtype, x_TK.device, trusted)
        self.slots = [
            (index, number, name)
            for index, layer in enumerate(layers)
            for number, low in layer.adapters.items()
            for name in low.operands()
        ]
        """Layer, adapter and name of every operand that gets a gradient; `flat` has the operands."""
        self.flat = tuple(layers[index].adapters[number].operands()[name] for index, number, name in self.slots)
        dtypes = {t.dtype for t in self.flat}
        self.wide = dtypes.pop() if len(dtypes) == 1 else torch.float32
        """What kernels write gradients in: the parameters' dtype where all agree."""
        self.num_adapters = 1 + max(self.layout.rows, default=-1)
        self.compositions = {
            index: Composition(layer, self.num_adapters, x_TK.dtype, kernels)
            for index, layer in enumerate(layers)
            if not all(low.plain for low in layer.adapters.values())
        }
        """Of layers where an adapter has a magnitude or a bias of its own."""
        by_adapter: dict[int, set[float]] = {}
        for layer in layers:
            for number, low in layer.adapters.items():
                if low.rank:
                    by_adapter.setdefault(number, set()).add(low.scaling)
        self.scalings = {number: own.pop() if len(own) == 1 else None for number, own in by_adapter.items()}
        """Of each adapter, None where its layers scale differently."""
        self._steps: Recent[Steps] = Recent(4)
        self._last: tuple[tuple[Any, ...], Steps] | None = None
        """Key and value of the last call, which the next one is mostly like."""
        self.turn = 0
        """How often it was refreshed."""
        self._pass = OUTSIDE
        """The backward pass in which it was refreshed last."""
        if kernels:
            factors = {(n, j): low.scaling for j, layer in enumerate(layers) for n, low in layer.adapters.items()}
            self.tables = make_group_tables(self.layout, factors, self.num_adapters, self.device)

    def steps(self, x_TK: torch.Tensor, runs: tuple[Run, ...], salt: int, plan: Plan) -> Steps:
        """Those of such a call; kept for the next one like it."""
        aligned = x_TK.is_contiguous() and x_TK.data_ptr() % 16 == 0
        key = (runs, x_TK.shape[0], salt, plan, aligned)
        last = self._last
        if last is not None and last[0][0] is runs and last[0][3] is plan and last[0] == key:
            return last[1]
        steps = self._steps.get(key, lambda: Steps(self, x_TK, runs, salt, plan))
        self._last = key, steps
        return steps

    def trains_magnitude(self) -> bool:
        """Whether a backward may need products of the forward beside S."""
        named = zip(self.slots, self.flat, strict=True)
        return any(name == "magnitude" and operand.requires_grad for (_, _, name), operand in named)

    def refresh(self) -> None:
        """Bring packed operands and scales up to date with the parameters."""
        with _REFRESHING:
            self.turn, self._pass = self.turn + 1, _backward_pass()
            self.packed.refresh(self.layers)
            for composition in self.compositions.values():
                composition.refresh(self.trusted)

    def serve(self, turn: int) -> None:
        """Be ready for a backward whose forward was at this turn."""
        if turn != self.turn and (self._pass == OUTSIDE or self._pass != _backward_pass()):
            self.refresh()

    def fits(self, x_TK: torch.Tensor, layers: tuple[Layer, ...]) -> bool:
        """Whether these are the layers that it was made for, the very objects."""
        if x_TK.dtype != self.dtype or x_TK.device != self.device or x_TK.shape[1] != self.K:
            return False
        if layers is self.layers:
            return True
        return len(layers) == len(self.layers) and all(
            new is old or _same_layer(new, old) for new, old in zip(layers, self.layers, strict=True)
        )


def _same_layer(new: Layer, old: Layer) -> bool:
    """The very same operands."""
    return (
        new.weight is old.weight and new.bias is old.bias and new.adapters.keys() == old.adapters.keys()
        and new.keep_output == old.keep_output and all(_same(low, old.adapters[n]) for n, low in new.adapters.items())
    )  # fmt: skip


def _same(new: LowRank, old: LowRank) -> bool:
    """The very same operands."""
    return new is old or (
        new.A is old.A and new.B is old.B and new.scaling == old.scaling and new.magnitude is old.magnitude
        and new.bias is old.bias and new.norm is old.norm
    )  # fmt: skip


def lora_group(
    x: torch.Tensor,
    layers: Sequence[Layer],
    runs: Sequence[Run],
    keys_T2: torch.Tensor | None = None,
    salt: int = 0,
    plan: Plan = CHAIN,
    state: GroupState | None = None,
    recipe: Recompute | None = None,
) -> tuple[torch.Tensor, ...]:
    """Outputs y [..., N] of every layer, in the dtype of x.

    A and B may be of a wider dtype than x: they are cast to x's for the products, x is never cast, and their gradients come
    back in their own dtype.

    Args:
        x: tokens, [..., K]; T of them over all leading dimensions.
        layers: those that read them.
        runs: who owns which tokens; disjoint.
        keys_T2: dropout keys (ops.dropout.token_keys), needed where a run has dropout.
        salt: of the group (ops.dropout.layer_salt).
        plan: how to compute it; the plain chain takes its place where it does not compute this call (plan.legal).
        state: kept by the caller from call to call, so that unchanged layers are not checked and packed again.
        recipe: how x is made again in the backward; it is then not kept. Of no use, and left aside, under checkpointing.

    Raises:
        ValueError: an operand does not fit; the message names it.
    """
    with on_device(x.device):
        return _lora_group(x, tuple(layers), tuple(runs), keys_T2, salt, plan, state, recipe)


def _lora_group(
    x: torch.Tensor, layers: tuple[Layer, ...], runs: tuple[Run, ...], keys_T2: torch.Tensor | None, salt: int, plan: Plan,
    state: GroupState | None, recipe: Recompute | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    x_TK = x if x.ndim == 2 else _tokens(x.detach())
    check_tokens(x_TK, runs, keys_T2)
    if plan.rearranged:
        plan = legal(plan, situation(layers, runs, x_TK.shape[0]))
    prepared = (state or GroupState()).prepared(x_TK, layers, plan)
    if plan.rearranged:
        from packlora.ops.lora_linear.products import lora_group_products

        made = lora_group_products(_tokens(x), layers, runs[0].adapter, keys_T2, runs[0].dropout, salt, plan)
        return tuple(y_TN.view(*x.shape[:-1], y_TN.shape[1]) for y_TN in made)
    if plan.needs_triton and not HAS_TRITON:
        raise ValueError(f"plan {plan.name} needs triton, which is not installed")
    prepared.refresh()
    kept_steps = prepared.steps(x_TK, runs, salt, plan)
    steps = kept_steps.with_tokens(x_TK, keys_T2)
    if is_checkpointed():  # makes x again anyway, which is then alive no longer than its block's backward
        recipe = None
    if not saving_is_hooked() or prepared.trains_magnitude():
        outputs: tuple[torch.Tensor, ...] = _Group.apply(x, recipe, steps, kept_steps, True, *prepared.flat)
        return outputs
    *stand_ins, S = _Group.apply(x, recipe, steps, kept_steps, False, *prepared.flat)
    return Outputs.of(lambda: [_shaped(y_TN, x) for y_TN in steps.up(S)[0]], stand_ins)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """[T, K]."""
    return x if x.ndim == 2 or not x.ndim else x.reshape(-1, x.shape[-1])


def _shaped(y_TN: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """y with the leading dimensions of x. No view: autograd lets nobody write into views that a node of ours made."""
    return y_TN if x.ndim == 2 else y_TN.resize_(*x.shape[:-1], y_TN.shape[1])


class _Group(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, recipe: Recompute | None, steps: Steps, kept_steps: Steps, whole: bool, *flat: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """The outputs; where not `whole`, their stand-ins and S. kept_steps: without tokens, which are autograd's to keep."""
        S, keys_T2 = steps.down(), steps.keys_T2
        if whole:
            outputs, kept = steps.up(S)
            outputs = [_shaped(y_TN, x) for y_TN in outputs]
        else:
            outputs, kept = [stand_in(x, layer.weight) for layer in steps.layers], [None] * len(steps.layers)
        ctx.set_materialize_grads(False)
        # A, B, magnitudes and biases for autograd's own check that nobody changes them before the backward; of others' jobs
        # may step by then
        source = (x,) if recipe is None else recipe.operands
        ctx.save_for_backward(keys_T2, S if steps.plan.keep_s else None, *kept, *source, *steps.owned)
        ctx.make = (
            None if recipe is None else recipe.function
        )  # not the operands, which autograd may drop and bring back
        ctx.source = slice(len(kept), len(kept) + len(source))
        ctx.steps, ctx.turn, ctx.shape = kept_steps, steps.prepared.turn, x.shape
        if whole:
            return tuple(outputs)
        ctx.mark_non_differentiable(S)
        return (*outputs, S)

    @staticmethod
    @first_order
    def backward(ctx: Any, *d: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        keys_T2, S, *rest = ctx.saved_tensors
        d = d[: len(ctx.steps.layers)]
        kept, source, need_flat = rest[: len(d)], tuple(rest[ctx.source]), ctx.needs_input_grad[5:]
        if all(grad is None for grad in d) or not any(ctx.needs_input_grad):
            return (None,) * (5 + len(need_flat))
        x_TK = _tokens(source[0] if ctx.make is None else recomputed(ctx.make, source))
        steps = ctx.steps.with_tokens(x_TK, keys_T2)
        steps.prepared.serve(ctx.turn)
        if len(ctx.shape) != 2:
            kept, d = (tuple(None if t is None else _tokens(t) for t in own) for own in (kept, d))
        dx, grads = group_backward(steps, S, kept, d, ctx.needs_input_grad[0], need_flat)
        dx = dx if dx is None or len(ctx.shape) == 2 else dx.view(ctx.shape)
        return (dx, None, None, None, None, *grads)


OUTSIDE = -1
"""Instead of the number of a backward pass where none is running."""
_backward_pass: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: OUTSIDE)
"""Number of the backward pass that is running in this thread; what checkpointing recomputes belongs to it."""
_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def saving_is_hooked() -> bool:
    """Whether what autograd saves goes through hooks, as under torch.utils.checkpoint; False where torch does not tell."""
    return _TOP_HOOKS is not None and _TOP_HOOKS(False) is not None


def is_checkpointed() -> bool:
    """Whether torch.utils.checkpoint keeps or remakes what autograd saves (use_reentrant=False)."""
    hooks = _TOP_HOOKS(False) if _TOP_HOOKS is not None else None
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def stand_in(x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """What autograd takes for the output [..., N] of a node that does not make it. Holds one element of memory, not set."""
    return x.new_empty_strided((*x.shape[:-1], len(weight_NK)), (0,) * x.ndim)


class Outputs(torch.autograd.Function):
    """Outputs in the place of stand-ins: the second of two nodes, of which the first has saved all that its backward needs.

    Autograd packs what a node saves after the node's whole forward, and checkpointing's recomputation stops when it has the
    last tensor of its block. Were the outputs made by the node that saves, the recomputation would make those of its last
    layer, base product and all, for nobody: down_proj's of every block of a Llama.
    """

    @staticmethod
    def of(make: Callable[[], Sequence[torch.Tensor]], stand_ins: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What `make` gives, with the history of the stand-ins."""
        outputs: tuple[torch.Tensor, ...] = Outputs.apply(make, *stand_ins)
        return outputs

    @staticmethod
    def forward(
        ctx: Any, make: Callable[[], Sequence[torch.Tensor]], *stand_ins: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(make())

    @staticmethod
    def backward(ctx: Any, *d: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *d)


def group_backward(
    steps: Steps, S: torch.Tensor | None, kept: Sequence[torch.Tensor | None], d: Sequence[torch.Tensor | None], need_x: bool,
    need_flat: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:  # fmt: skip
    """dx, and the gradients of `prepared.flat`, None where not needed. S and kept: from the forward; S None: made again."""
    prepared, runs = steps.prepared, steps.every
    grads = [None if grad is None else grad.contiguous() for grad in d]
    present, layout = {run.adapter for run in runs}, prepared.layout
    # by what was trained in the forward: it may have been frozen, or another unfrozen, since
    steps.wanted = {
        (index, name)
        for (index, number, name), wanted in zip(prepared.slots, need_flat, strict=True)
        if wanted and number in present
    }
    need = {name for _, name in steps.wanted}
    dx, dA, dB, sums = steps.backward(grads, kept, steps.down() if S is None else S, need_x, "A" in need, "B" in need)
    out: list[torch.Tensor | None] = []
    for (index, number, name), operand, wanted in zip(prepared.slots, prepared.flat, need_flat, strict=True):
        own: torch.Tensor | None = None
        if wanted and number in present and grads[index] is not None:  # else no gradient, rather than one of zeros
            place = layout.places.get((number, index))
            if name == "A" and dA is not None and place is not None:
                first = layout.rows[number][0] + place.column
                own = dA if place.rank == layout.num_rows else dA[first : first + place.rank]
            elif name == "B" and (flat_B := dB[index]) is not None and place is not None:
                own = layout.b_block(flat_B, number, index)
                own = own if place.rank == place.padded else own[:, : place.rank]
            elif name == "magnitude":
                own = sums[index][number].dm
            elif name == "bias":
                own = sums[index][number].d
        out.append(own if own is None or own.dtype == operand.dtype else own.to(operand.dtype))
    return dx, out


def check_tokens(x_TK: torch.Tensor, runs: Sequence[Run], keys_T2: torch.Tensor | None) -> None:
    """Raise ValueError, naming the operand, where x, the runs or the keys do not fit."""
    if x_TK.ndim != 2 or not x_TK.is_floating_point() or x_TK.stride(1) != 1:
        raise ValueError(
            f"x must be a float tensor [T, K] with contiguous rows; got {tuple(x_TK.shape)} {x_TK.dtype}, strides "
            f"{x_TK.stride()}"
        )
    T, end = x_TK.shape[0], 0
    for run in runs if len(runs) < 2 else sorted(runs, key=lambda run: run.start):
        if not end <= run.start < run.stop <= T or run.adapter < 0:
            raise ValueError(
                f"run {run.start}:{run.stop} of adapter {run.adapter} overlaps another, is empty or leaves the {T} tokens"
            )
        end = run.stop
        if run.dropout and (keys_T2 is None or keys_T2.shape != (T, 2) or keys_T2.dtype != torch.int32):
            found = None if keys_T2 is None else f"{tuple(keys_T2.shape)} {keys_T2.dtype}"
            raise ValueError(f"dropout needs keys [{T}, 2] int32, got {found}")


def check_layers(x_TK: torch.Tensor, layers: Sequence[Layer]) -> None:
    """Raise ValueError, naming the operand, for shapes, dtypes and devices that do not fit."""
    K = x_TK.shape[1]
    for index, layer in enumerate(layers):
        weight = layer.weight
        if weight.ndim != 2 or weight.shape[1] != K or weight.dtype != x_TK.dtype or weight.device != x_TK.device:
            raise ValueError(
                f"weight of layer {index} must be [N, {K}] {x_TK.dtype} on {x_TK.device}; got {tuple(weight.shape)} "
                f"{weight.dtype} on {weight.device}"
            )
        N = len(weight)
        if layer.bias is not None and tuple(layer.bias.shape) != (N,):
            raise ValueError(f"bias of layer {index} must be [{N}]; got {tuple(layer.bias.shape)}")
        for number, low in layer.adapters.items():
            if (low.A is None) != (low.B is None):
                raise ValueError(f"A and B of adapter {number} on layer {index} come together or not at all")
            if low.magnitude is not None and (low.A is None or low.norm is None):
                raise ValueError(
                    f"the magnitude of adapter {number} on layer {index} needs A, B and the norm of W + s B A"
                )
            shapes = {"A": (low.rank, K), "B": (N, low.rank), "magnitude": (N,), "bias": (N,), "norm": (N,)}
            operands = low.operands()
            if isinstance(low.norm, torch.Tensor):
                operands["norm"] = low.norm
            for name, operand in operands.items():
                if tuple(operand.shape) != shapes[name] or operand.device != x_TK.device or not operand.numel():
                    rank = ", rank 1 or more," if name in "AB" else ""
                    raise ValueError(
                        f"{name} of adapter {number} on layer {index} must be {shapes[name]}{rank} on {x_TK.device}; got "
                        f"{tuple(operand.shape)} on {operand.device}"
                    )
