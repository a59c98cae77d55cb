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

from collections.abc import Callable, Sequence
from typing import Any

import torch

from packlora.ops.first_order import first_order
from packlora.ops.gpu import HAS_TRITON, on_device
from packlora.ops.lora_linear.plan import CHAIN, Plan, legal
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.steps import Steps
from packlora.ops.lora_linear.types import Layer, Segment, check_tokens, situation
from packlora.ops.recipe import Recipe, made_again


def lora_group(
    x: torch.Tensor,
    layers: Sequence[Layer],
    segments: Sequence[Segment],
    keys_T2: torch.Tensor | None = None,
    salt: int = 0,
    plan: Plan = CHAIN,
    state: GroupState | None = None,
    recipe: Recipe | None = None,
) -> tuple[torch.Tensor, ...]:
    """Outputs y [..., N] of every layer, in the dtype of x.

    A and B may be of a wider dtype than x: they are cast to x's for the products, x is never cast, and their gradients come
    back in their own dtype.

    Args:
        x: tokens, [..., K]; T of them over all leading dimensions.
        layers: those that read them.
        segments: who owns which tokens; disjoint.
        keys_T2: dropout keys (ops.dropout.token_keys), needed where a segment has dropout.
        salt: of the group (ops.dropout.layer_salt).
        plan: how to compute it; the plain chain takes its place where it does not compute this call (plan.legal).
        state: kept by the caller from call to call, so that unchanged layers are not checked and packed again.
        recipe: how x is made again in the backward; it is then not kept. Of no use, and left aside, under checkpointing.

    Raises:
        ValueError: an operand does not fit; the message names it.
    """
    with on_device(x.device):
        return _lora_group(x, tuple(layers), tuple(segments), keys_T2, salt, plan, state, recipe)


def _lora_group(
    x: torch.Tensor, layers: tuple[Layer, ...], segments: tuple[Segment, ...], keys_T2: torch.Tensor | None, salt: int, plan: Plan,
    state: GroupState | None, recipe: Recipe | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    x_TK = x if x.ndim == 2 else _tokens(x.detach())
    check_tokens(x_TK, segments, keys_T2)
    if plan.rearranged:
        plan = legal(plan, situation(layers, segments, x_TK.shape[0]))
    prepared = (state or GroupState()).prepared(x_TK, layers, plan)
    if plan.rearranged:
        from packlora.ops.lora_linear.products import lora_group_products

        made = lora_group_products(_tokens(x), layers, segments[0].adapter, keys_T2, segments[0].dropout, salt, plan)
        return tuple(y_TN.view(*x.shape[:-1], y_TN.shape[1]) for y_TN in made)
    if plan.needs_triton and not HAS_TRITON:
        raise ValueError(f"plan {plan.name} needs triton, which is not installed")
    prepared.refresh()
    kept_steps = prepared.steps(x_TK, segments, salt, plan)
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
        ctx: Any, x: torch.Tensor, recipe: Recipe | None, steps: Steps, kept_steps: Steps, whole: bool, *flat: torch.Tensor
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
        x_TK = _tokens(source[0] if ctx.make is None else made_again(ctx.make, source))
        steps = ctx.steps.with_tokens(x_TK, keys_T2)
        steps.prepared.serve(ctx.turn)
        if len(ctx.shape) != 2:
            kept, d = (tuple(None if t is None else _tokens(t) for t in own) for own in (kept, d))
        dx, grads = group_backward(steps, S, kept, d, ctx.needs_input_grad[0], need_flat)
        dx = dx if dx is None or len(ctx.shape) == 2 else dx.view(ctx.shape)
        return (dx, None, None, None, None, *grads)


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
    prepared, segments = steps.prepared, steps.every
    grads = [None if grad is None else grad.contiguous() for grad in d]
    present, layout = {segment.adapter for segment in segments}, prepared.layout
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
