"""A group of frozen linear layers that read the same tokens, with the LoRA and DoRA adapters on them, for autograd.

    y_j = g_j (x W_j' + s_j drop(x) A_j' B_j') + bias_j         for every layer j of the group and the token's own adapter

x is read once for the S of all layers, saved once, and gets one gradient. Saved beside it: S, [T, sum of the ranks], and for
layers with a DoRA adapter z, the product that the magnitude's gradient needs (or nothing, where y can be read again). No mask
and no dropped copy of x: all layers of a group share one mask, that of the tensor they read, recomputed from its counters.

This file owns the call and its autograd node, for all plans; prepared.py keeps what is made once, the paths compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from packlora.ops.first_order import first_order
from packlora.ops.gpu import HAS_TRITON, is_elsewhere, on_device
from packlora.ops.lora_linear.boundaries import ON_HOST, Boundaries
from packlora.ops.lora_linear.call import Call, Dropped, Gradients
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan
from packlora.ops.lora_linear.prepared import GroupState, Prepared
from packlora.ops.lora_linear.temporary import forget
from packlora.ops.lora_linear.types import Layer, Segment, check_tokens, rows_of
from packlora.ops.recompute import Recompute, recomputed


def lora_group(
    x: torch.Tensor,
    layers: Sequence[Layer],
    segments: Sequence[Segment],
    keys_T2: torch.Tensor | None = None,
    salt: int = 0,
    plan: Plan = CHAIN,
    state: GroupState | None = None,
    recompute: Recompute | None = None,
    boundaries: Boundaries = ON_HOST,
) -> tuple[torch.Tensor, ...]:
    """Outputs y [..., N] of every layer, in the dtype of x.

    A and B may be of a wider dtype than x: they are cast to x's for the products, x is never cast, and their gradients come
    back in their own dtype.

    Args:
        x: tokens, [..., K]; T of them over all leading dimensions.
        layers: those that read them.
        segments: who owns which tokens; disjoint.
        keys_T2: dropout keys (ops.dropout.keys.token_keys), needed where a segment has dropout.
        salt: of the group (ops.dropout.keys.layer_salt).
        plan: how to compute it; the plain chain takes its place where it does not compute this call (plan.legal).
        state: kept by the caller from call to call, so that unchanged layers are not checked and packed again.
        recompute: how the backward makes x again, so that x is not kept. Under checkpointing, which does so too, it is left
            aside. One that has `elsewhere` (own_tokens.py) gives the gradients of all A without x, and changes the plan.
        boundaries: of the segments. Where they move (moving.py) these are nominal, the true ones are on the device, and the
            operands are those of the last `refresh`.

    Raises:
        ValueError: an operand does not fit; the message names it. The plan does not compute segments that move.
    """
    if is_elsewhere(x.device):
        with on_device(x.device):
            return lora_group(x, layers, segments, keys_T2, salt, plan, state, recompute, boundaries)
    layers, segments = tuple(layers), tuple(segments)
    if x.ndim > 2 and not x.is_contiguous():
        x = x.contiguous()
    check_tokens(x, segments, keys_T2)
    if not HAS_TRITON and plan.needs_triton:
        raise ValueError(f"plan {plan.name} needs triton, which is not installed")
    own_tokens = None if recompute is None else recompute.elsewhere
    plan = plan if own_tokens is None else own_tokens.plan(plan)
    few = None if torch.is_grad_enabled() or x.element_size() != 2 else _few_rows(x, layers, segments)
    plan = plan if few is None else ROUTED
    prepared = (state or GroupState()).prepared(x, layers, plan, own_tokens is not None and x.is_cuda)
    call = prepared.call(x, segments, salt, plan, boundaries.settled)
    boundaries.ready(prepared, call)
    if not torch.is_grad_enabled():  # no gradients are needed: no node, and nothing is kept
        if few is not None and call.plan == ROUTED:
            return tuple(y.view(*x.shape[:-1], -1) for y in few(call, prepared.operands, rows_of(x)))
        x_TK, dropped, S = made_S(prepared, call, x, keys_T2)
        return tuple(outputs_of(prepared, call, x_TK, dropped, S, x.shape, False)[0])
    hooks = saving_hooks()
    if own_tokens is not None:
        recompute = own_tokens.recompute(prepared, call, x, boundaries)
    elif hooks is not None and is_checkpoint(hooks):  # makes x again, alive no longer than its block's backward
        recompute = None
    if hooks is not None:
        return _saving_through_hooks(x, keys_T2, recompute, prepared, call)
    outputs: tuple[torch.Tensor, ...] = _apply(x, keys_T2, recompute, prepared, call, True, *prepared.owned(call))
    return outputs


def _few_rows(
    x: torch.Tensor, layers: tuple[Layer, ...], segments: tuple[Segment, ...]
) -> Callable[[Call, Any, torch.Tensor], list[torch.Tensor]] | None:
    """The way of few tokens (few_rows.py), where it computes them."""
    from packlora.ops.lora_linear import few_rows

    return few_rows.outputs if few_rows.are_few(x, layers, segments) else None


class Group(torch.autograd.Function):
    """The node. Its tensors are x, the dropout keys and the operands of the adapters that own tokens: autograd looks at each in
    the backward, also where it has no gradient. What else it is given was settled before."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, keys_T2: torch.Tensor | None, recompute: Recompute | None, prepared: Prepared, call: Call,
        with_outputs: bool, *owned: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        """The outputs; where they are made by `Outputs`, placeholders and S."""
        shape = x.shape
        x_TK, dropped, S = made_S(prepared, call, x, keys_T2)
        outputs: list[torch.Tensor]
        kept: list[torch.Tensor | None] = [None] * len(prepared.layers)
        if with_outputs:
            outputs, kept = outputs_of(prepared, call, x_TK, dropped, S, shape, True)
        else:
            outputs = [placeholder(x, layer.frozen.shape[0]) for layer in prepared.layers]
        ctx.set_materialize_grads(False)
        # autograd checks that nobody changes the operands before the backward; those of other jobs may step by then. Where x is
        # recomputed its operands, which autograd may drop and bring back; else the view of x, which has x's version
        source, function = ((x_TK,), None) if recompute is None else (recompute.operands, recompute.function)
        ctx.save_for_backward(keys_T2, S if call.keeps_S else None, *kept, *source, *owned)
        ctx.made = prepared, call, prepared.turn, shape, function, len(source)
        if with_outputs:
            return tuple(outputs)
        if S is not None:
            ctx.mark_non_differentiable(S)
        return (*outputs, S)

    @staticmethod
    @first_order
    def backward(ctx: Any, *d: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (prepared, call, turn, shape, function, count), needed = ctx.made, ctx.needs_input_grad
        keys_T2, S, *rest = ctx.saved_tensors
        layers = len(prepared.layers)
        d, kept = d[:layers], rest[:layers]
        if not any(needed) or (d[0] is None and all(grad is None for grad in d)):
            return (None,) * len(needed)
        x_TK = rest[layers] if function is None else rows_of(recomputed(function, tuple(rest[layers : layers + count])))
        if turn != prepared.turn:
            prepared.serve(turn, call)
        leave = getattr(function, "leave", None)
        dx, grads = gradients(prepared, call, x_TK, keys_T2, S, kept, d, needed[0], needed[6:], leave)
        return (dx if dx is None or dx.ndim == len(shape) else dx.view(shape), None, None, None, None, None, *grads)


_apply: Callable[..., Any] = super(torch.autograd.Function, Group).apply
"""Group.apply without its check of every operand for wrappers of torch.func, under which the operator is not used."""


def made_S(
    prepared: Prepared, call: Call, x: torch.Tensor, keys_T2: torch.Tensor | None
) -> tuple[torch.Tensor, Dropped, torch.Tensor | None]:
    """x as [T, K], what outputs read of it dropped, and S [T, width] where the plan makes one."""
    x_TK = rows_of(x)
    dropped = call.dropped(x_TK, keys_T2)
    S = None if call.plan.up == "merged" else call.down.down(call, prepared.operands, x_TK, keys_T2, dropped)
    return x_TK, dropped, S


def outputs_of(
    prepared: Prepared, call: Call, x_TK: torch.Tensor, dropped: Dropped, S: torch.Tensor | None, shape: torch.Size, keep: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:  # fmt: skip
    """y [..., N] of every layer for x of this shape, and, with `keep`, what the backward of layers with scales needs beside
    them: z [T, N], or y itself where the layer keeps its output, or None."""
    own = prepared.operands
    trained: Collection[int] = ()
    if keep and call.composed:
        owned = prepared.owned(call)
        trained = [slot.layer for slot in call.slots if slot.name == "magnitude" and owned[slot.at].requires_grad]
    outputs: list[torch.Tensor] = []
    kept: list[torch.Tensor | None] = []
    try:
        for index, path in enumerate(call.up):
            y, z = path.up(call, own, x_TK, dropped, S, index, index in trained and not call.from_y[index])
            forget(layer=True)
            if y.ndim != len(shape):  # no view: autograd lets nobody write into views that a node of ours made
                y.resize_(*shape[:-1], y.shape[1])
            outputs.append(y)
            kept.append(None if index not in trained else y if z is None else z)
    finally:
        forget()
    return outputs, kept


def gradients(
    prepared: Prepared, call: Call, x_TK: torch.Tensor, keys_T2: torch.Tensor | None, S: torch.Tensor | None,
    kept: Gradients, d: Gradients, need_x: bool, need_owned: tuple[bool, ...], leave: Callable[..., None] | None = None,
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:  # fmt: skip
    """dx [T, K] or as x, and the gradients of `prepared.owned(call)`, None where not needed. S and kept: from the forward; S
    None: recomputed. d: as the outputs are. leave: takes dS (own_tokens.py); x_TK is not read then, no A gets a gradient."""
    own, layout = prepared.operands, call.layout
    d = [None if grad is None else grad.contiguous() for grad in d]
    # by what was trained in the forward: it may have been frozen, or another unfrozen, since. Where nothing came back there is
    # no gradient, rather than one of zeros
    wanted, slots = call.wanted(need_x, need_owned)
    if S is None and call.needs_S(wanted):
        S = call.down.down(call, own, x_TK, keys_T2, {})
    e, dS, dB, sums, dA = call.grads.grads(call, own, x_TK, keys_T2, S, d, kept, wanted)
    if leave is not None and wanted.A:
        leave(dS, keys_T2, d)
        wanted = wanted._replace(A=False)
    try:
        dx, dA_inputs = call.inputs.inputs(call, own, x_TK, keys_T2, dS, e, d, wanted)
    finally:
        forget()
    dA = dA_inputs if dA is None else dA
    out: list[torch.Tensor | None] = [None] * len(need_owned)
    owned = prepared.owned(call)
    A_blocks: dict[int, tuple[torch.Tensor, ...]] = {}
    for at, index, number, name, place, block, _ in slots:
        grad: torch.Tensor | None = None
        if d[index] is None:
            continue
        if name == "A" and dA is not None and place is not None:
            if number not in A_blocks:
                A_blocks[number] = layout.a_blocks(dA, number)
            grad = A_blocks[number][block]
            grad = grad if place.rank == place.padded else grad[: place.rank]
        elif name == "B" and (flat_B := dB[index]) is not None and place is not None:
            grad = flat_B if flat_B.ndim == 2 else layout.b_block(flat_B, number, index)
            grad = grad if place.rank == place.padded else grad[:, : place.rank]
        elif name == "magnitude":
            grad = sums[index][number].dm
        elif name == "bias":
            grad = sums[index][number].d
        dtype = owned[at].dtype
        out[at] = grad if grad is None or grad.dtype == dtype else grad.to(dtype)
    return dx, out


# --- where what autograd saves goes through hooks, as under checkpointing --------------------------------------------------

_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def saving_hooks() -> tuple[Any, ...] | None:
    """The hooks through which what autograd saves goes, as under torch.utils.checkpoint; None where torch does not tell."""
    return None if _TOP_HOOKS is None else _TOP_HOOKS(False)


def is_checkpoint(hooks: tuple[Any, ...]) -> bool:
    """Whether they are torch.utils.checkpoint's, which keeps or remakes what autograd saves (use_reentrant=False)."""
    return getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def _saving_through_hooks(
    x: torch.Tensor, keys_T2: torch.Tensor | None, recompute: Recompute | None, prepared: Prepared, call: Call
) -> tuple[torch.Tensor, ...]:
    """Outputs where what autograd saves goes through hooks: by two nodes, see Outputs."""
    outputs: tuple[torch.Tensor, ...]
    owned = prepared.owned(call)
    if any(slot.name == "magnitude" and owned[slot.at].requires_grad for slot in call.slots):  # it needs more than S
        outputs = _apply(x, keys_T2, recompute, prepared, call, True, *owned)
        return outputs
    *placeholders, S = _apply(x, keys_T2, recompute, prepared, call, False, *owned)
    x_TK = rows_of(x.detach())

    def make() -> Sequence[torch.Tensor]:
        # under a frozen magnitude x is dropped once more here, rather than kept dropped
        return outputs_of(prepared, call, x_TK, call.dropped(x_TK, keys_T2), S, x.shape, False)[0]

    return Outputs.apply(make, *placeholders)  # type: ignore[no-any-return]


def placeholder(x: torch.Tensor, N: int) -> torch.Tensor:
    """Stand-in for the output [..., N] of a node that computes the output elsewhere. It holds one element of memory,
    uninitialised."""
    return x.new_empty_strided((*x.shape[:-1], N), (0,) * x.ndim)


class Outputs(torch.autograd.Function):
    """Node that returns the results of `make` with the autograd history of the placeholders: the second half of a node that has
    saved all the tensors that it needs.

    Autograd packs the tensors that a node saves after the node's whole forward, and the recomputation of activation
    checkpointing stops once it has the last saved tensor of its block. If the node that saves also made the outputs, the
    recomputation would compute the outputs of the block's last layer (down_proj in a Llama), base product included, although
    nothing reads them.
    """

    @staticmethod
    def forward(
        ctx: Any, make: Callable[[], Sequence[torch.Tensor]], *placeholders: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(make())

    @staticmethod
    def backward(ctx: Any, *d: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *d)
