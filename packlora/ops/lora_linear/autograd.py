"""A group of frozen linear layers that read the same tokens, with the LoRA and DoRA adapters on them, for autograd.

    y_j = g_j (x W_j' + s_j drop(x) A_j' B_j') + bias_j         for every layer j of the group and the token's own adapter

x is read once for the S of all layers, saved once, and gets one gradient. Saved beside it: S, [T, sum of the ranks], and for
layers with a DoRA adapter z, the product that the magnitude's gradient needs (or nothing, where y can be read again). No mask
and no dropped copy of x: all layers of a group share one mask, that of the tensor they read, recomputed from its counters.

This file owns the call and its autograd node, for all plans; prepared.py keeps what is made once, the paths compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from packlora.ops.first_order import first_order
from packlora.ops.gpu import HAS_TRITON, on_device
from packlora.ops.lora_linear.call import Call, Gradients
from packlora.ops.lora_linear.moving import MovingSegments
from packlora.ops.lora_linear.plan import CHAIN, Plan
from packlora.ops.lora_linear.prepared import GroupState, Prepared
from packlora.ops.lora_linear.temporary import no_longer_than_this
from packlora.ops.lora_linear.types import Layer, Segment, check_tokens
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
    moving: MovingSegments | None = None,
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
        recompute: how x is recomputed in the backward; it is then not kept. Of no use, and left aside, under checkpointing.
        moving: whose nominal segments these are, the true ones being on the device; the operands are then those of its last
            `refresh`.

    Raises:
        ValueError: an operand does not fit; the message names it. The plan does not compute segments that move.
    """
    with on_device(x.device):
        layers, segments, grad = tuple(layers), tuple(segments), torch.is_grad_enabled()
        x_TK = x if x.ndim == 2 else _tokens(x.detach() if grad else x)
        check_tokens(x_TK, segments, keys_T2)
        if not HAS_TRITON and plan.needs_triton:
            raise ValueError(f"plan {plan.name} needs triton, which is not installed")
        prepared = (state or GroupState()).prepared(x_TK, layers, plan)
        if moving is None:
            prepared.refresh()
        else:
            moving.serve(prepared)
        call = prepared.call(x_TK, segments, salt, plan, moving if moving is not None and moving.moves else None)
        if not grad:  # nobody asks for gradients: no node, and nothing is kept
            S = made_S(prepared, call, x_TK, keys_T2)
            return tuple(outputs_of(prepared, call, x_TK, keys_T2, S, x.shape, False)[0])
        if is_checkpointed():  # makes x again anyway, which is then alive no longer than its block's backward
            recompute = None
        if not saving_is_hooked() or prepared.trains_magnitude():
            outputs: tuple[torch.Tensor, ...] = Group.apply(
                x, x_TK, keys_T2, recompute, prepared, call, True, *prepared.flat
            )
            return outputs
        *placeholders, S = Group.apply(x, x_TK, keys_T2, recompute, prepared, call, False, *prepared.flat)
        return Outputs.apply(lambda: outputs_of(prepared, call, x_TK, keys_T2, S, x.shape, False)[0], *placeholders)  # type: ignore[no-any-return]


class Group(torch.autograd.Function):
    """The node. Its tensors are x, the dropout keys and the operands; what else it is given was settled before, and x_TK is x
    again."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, x_TK: torch.Tensor, keys_T2: torch.Tensor | None, recompute: Recompute | None,
        prepared: Prepared, call: Call, with_outputs: bool, *flat: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        """The outputs; where they are made by `Outputs`, placeholders and S."""
        S = made_S(prepared, call, x_TK, keys_T2)
        outputs: list[torch.Tensor]
        kept: list[torch.Tensor | None] = [None] * len(prepared.layers)
        if with_outputs:
            outputs, kept = outputs_of(prepared, call, x_TK, keys_T2, S, x.shape, True)
        else:
            outputs = [placeholder(x, layer.frozen.shape[0]) for layer in prepared.layers]
        ctx.set_materialize_grads(False)
        # operands of the adapters that own tokens: autograd checks that nobody changes them before the backward; those of other
        # jobs may step by then. Where x is recomputed its operands, which autograd may drop and bring back
        source = (x,) if recompute is None else recompute.operands
        owned = [flat[slot.at] for slot in call.slots]
        ctx.save_for_backward(keys_T2, S if call.keeps_S else None, *kept, *source, *owned)
        ctx.recompute, ctx.source = None if recompute is None else recompute.function, len(source)
        ctx.prepared, ctx.call, ctx.turn, ctx.shape = prepared, call, prepared.turn, x.shape
        if with_outputs:
            return tuple(outputs)
        if S is not None:
            ctx.mark_non_differentiable(S)
        return (*outputs, S)

    @staticmethod
    @first_order
    def backward(ctx: Any, *d: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        prepared, call, needed = ctx.prepared, ctx.call, ctx.needs_input_grad
        keys_T2, S, *rest = ctx.saved_tensors
        layers = len(prepared.layers)
        d, kept, source = d[:layers], rest[:layers], tuple(rest[layers : layers + ctx.source])
        if all(grad is None for grad in d) or not any(needed):
            return (None,) * len(needed)
        x_TK = _tokens(source[0] if ctx.recompute is None else recomputed(ctx.recompute, source))
        prepared.serve(ctx.turn)
        if len(ctx.shape) != 2:
            kept, d = [tuple([None if t is None else _tokens(t) for t in own]) for own in (kept, d)]
        dx, grads = gradients(prepared, call, x_TK, keys_T2, S, kept, d, needed[0], needed[7:])
        return (dx if dx is None or len(ctx.shape) == 2 else dx.view(ctx.shape), *(None,) * 6, *grads)


def made_S(prepared: Prepared, call: Call, x_TK: torch.Tensor, keys_T2: torch.Tensor | None) -> torch.Tensor | None:
    """S [T, width], where the plan makes one."""
    return None if call.plan.up == "merged" else call.down.down(call, prepared.operands, x_TK, keys_T2)


def outputs_of(
    prepared: Prepared, call: Call, x_TK: torch.Tensor, keys_T2: torch.Tensor | None, S: torch.Tensor | None,
    shape: torch.Size, keep: bool,
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:  # fmt: skip
    """y [..., N] of every layer for x of this shape, and, with `keep`, what the backward of layers with scales needs beside
    them: z [T, N], or y itself where the layer keeps its output, or None."""
    own = prepared.operands
    trained = set[int]()
    if keep and call.composed:
        trained = {s.layer for s in call.slots if s.name == "magnitude" and prepared.flat[s.at].requires_grad}
    outputs: list[torch.Tensor] = []
    kept: list[torch.Tensor | None] = []
    for index, path in enumerate(call.up):
        keep_z = index in trained and not call.from_y[index]
        with no_longer_than_this():
            y_TN, z_TN = path.up(call, own, x_TK, keys_T2, S, index, keep_z)
        # no view: autograd lets nobody write into views that a node of ours made
        outputs.append(y_TN if len(shape) == 2 else y_TN.resize_(*shape[:-1], y_TN.shape[1]))
        kept.append(None if index not in trained else outputs[-1] if call.from_y[index] else z_TN)
    return outputs, kept


def gradients(
    prepared: Prepared, call: Call, x_TK: torch.Tensor, keys_T2: torch.Tensor | None, S: torch.Tensor | None,
    kept: Gradients, d: Gradients, need_x: bool, need_flat: tuple[bool, ...],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:  # fmt: skip
    """dx, and the gradients of `prepared.flat`, None where not needed. S and kept: from the forward; S None: recomputed."""
    own, layout = prepared.operands, call.layout
    d = [None if grad is None else grad.contiguous() for grad in d]
    # by what was trained in the forward: it may have been frozen, or another unfrozen, since. Where nothing came back there is
    # no gradient, rather than one of zeros
    wanted, slots = call.wanted(need_x, need_flat)
    if S is None and call.needs_S(wanted):
        S = call.down.down(call, own, x_TK, keys_T2)
    e, dS, dB, sums, dA = call.grads.grads(call, own, x_TK, keys_T2, S, d, kept, wanted)
    with no_longer_than_this():
        dx, dA_inputs = call.inputs.inputs(call, own, x_TK, keys_T2, dS, e, d, wanted)
    dA = dA_inputs if dA is None else dA
    out: list[torch.Tensor | None] = [None] * len(need_flat)
    A_blocks: dict[int, tuple[torch.Tensor, ...]] = {}
    for at, index, number, name, place, block in slots:
        grad: torch.Tensor | None = None
        if d[index] is None:
            continue
        if name == "A" and dA is not None and place is not None:
            if number not in A_blocks:
                A_blocks[number] = layout.a_blocks(dA, number)
            grad = A_blocks[number][block]
            grad = grad if place.rank == place.padded else grad[: place.rank]
        elif name == "B" and (flat_B := dB[index]) is not None and place is not None:
            grad = layout.b_block(flat_B, number, index)
            grad = grad if place.rank == place.padded else grad[:, : place.rank]
        elif name == "magnitude":
            grad = sums[index][number].dm
        elif name == "bias":
            grad = sums[index][number].d
        dtype = prepared.flat[at].dtype
        out[at] = grad if grad is None or grad.dtype == dtype else grad.to(dtype)
    return dx, out


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """[T, K]."""
    return x if x.ndim == 2 or not x.ndim else x.reshape(-1, x.shape[-1])


# --- where what autograd saves goes through hooks, as under checkpointing --------------------------------------------------

_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def saving_is_hooked() -> bool:
    """Whether what autograd saves goes through hooks, as under torch.utils.checkpoint; False where torch does not tell."""
    return _TOP_HOOKS is not None and _TOP_HOOKS(False) is not None


def is_checkpointed() -> bool:
    """Whether torch.utils.checkpoint keeps or remakes what autograd saves (use_reentrant=False)."""
    hooks = _TOP_HOOKS(False) if _TOP_HOOKS is not None else None
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def placeholder(x: torch.Tensor, N: int) -> torch.Tensor:
    """What autograd takes for the output [..., N] of a node that does not make it. Holds one element of memory, not set."""
    return x.new_empty_strided((*x.shape[:-1], N), (0,) * x.ndim)


class Outputs(torch.autograd.Function):
    """What `make` gives, with the history of the placeholders: the second half of a node that has saved all that it needs.

    Autograd packs what a node saves after the node's whole forward, and checkpointing's recomputation stops when it has the
    last tensor of its block. Were the outputs made by the node that saves, the recomputation would make those of its last
    layer, base product and all, for nobody: down_proj's of every block of a Llama.
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
