"""Tensor parallelism: each process of a group holds a slice of every attention and feed-forward layer of the frozen model.

`shard` cuts a model by the plan that transformers has for its family. What is in the plan is one of

    colwise                  rows of W: a process computes some of the outputs, whole heads of them in an attention
    rowwise                  columns of W: a process multiplies the outputs it has, the products of all are added up
    colwise_gather_output    as the first, and every process is given all outputs (fused projections, norms over all heads)
    rowwise_split_input      as the second, on its part of inputs that every process has

A block, the module that has column-parallel layers, gets its input through `copied`: its layers still read one tensor, and its
gradient is added up once for all of them. Embedding and output layer are cut by words (vocabulary.py), norms are whole on every
process. An attention with fewer key-value heads than there are processes has each
of them on several.

Experts are not cut: the processes share them out (experts/cut.py), whatever the plan says of them. Products of thin slices of
many experts would be slower, what is held and sent is the same, and no gradient of theirs is a part of a sum. Routers, and
layers beside the experts that are not in the plan, are computed by each process alike. So are latent attentions (`LATENT`).

Adapters are put on a model that was cut (adapters/attach.py), and are cut alike (adapters/sharded.py); adapter.py adds up their
gradients and joins what is saved.

All processes run the same microbatches, or they wait for one another for ever: none goes on by itself after an error in a
forward or a backward (out of memory), the run ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from packlora.adapters.expert_layout import experts_of
from packlora.adapters.sharded import Shard, ShardedLinear, Through
from packlora.config import ParallelConfig
from packlora.errors import InputError
from packlora.ops.modules import beside_decoder
from packlora.parallel.collectives import add_up, copied, gathered, split, summed
from packlora.parallel.meta import run_on_meta
from packlora.parallel.sequence import TokenSlices, stands_in_layer, with_input
from packlora.parallel.vocabulary import cut_vocabulary

Dim = Literal[0, 1]
STYLES: dict[str, tuple[Dim, bool]] = {
    "colwise": (0, False), "rowwise": (1, False),
    "colwise_gather_output": (0, True), "colwise_rep": (0, True),
    "rowwise_split_input": (1, True), "rowwise_rep": (1, True),
}  # fmt: skip
"""Styles by transformers' name, newer and older: which dimension of W is cut, and whether what is outside of the layer is
whole."""
WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise")
"""Styles that are not looked at: of embeddings, which vocabulary.py cuts, and of what stays whole."""
EXPERTS = "moe_tp_experts"
"""The style of modules of experts."""
LATENT = "mla_kv_a_proj"
"""The style of a layer whose outputs all heads share: its attention stays whole."""
SHARED_HEADS = ("k_proj", "v_proj")
"""Layers whose heads several processes may have."""
HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads")
"""Names of attributes in which attentions count heads."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """A layer of the plan. whole: what is outside of it is whole; copies: processes that hold the same slice."""

    linear: torch.nn.Linear
    dim: Dim
    whole: bool
    copies: int = 1


def shard(
    model: PreTrainedModel, group: dist.ProcessGroup, sequence: bool = False, experts: dist.ProcessGroup | None = None,
    vocabulary: bool = True,
) -> list[str]:  # fmt: skip
    """Cut a model, in place, to the slices of this process. All processes of the groups call it with the same model.

    Call it before adapters are put on the model, and before the model is moved to its device where it is too large for one.

    Args:
        model: whole, on any device, as transformers has loaded it or prepared for packing.
        group: of at least two processes.
        sequence: each process has tokens of its own between the layers (sequence.py).
        experts: the processes that share out the experts, `group` and others like it, one behind the other; None: `group`.
        vocabulary: cut embedding and output layer too.

    Returns:
        What the user should know.

    Raises:
        InputError: see check_experts; or the model has no plan, or one with what is not known here; numbers of heads or of
            features do not divide; or a block's input is read by others than its column-parallel layers.
    """
    degree, rank = dist.get_world_size(group), dist.get_rank(group)
    what, cuts = _what(degree), _cuts(model, degree)
    blocks: dict[str, list[str]] = {}
    for path, cut in cuts.items():
        if cut.dim == 0:
            blocks.setdefault(_block(path), []).append(path)
    inside = _check_blocks(model, blocks, cuts, what)
    apart = {path for path in blocks if sequence and stands_in_layer(path)} - {_block(path) for path in inside}
    if sequence and not apart:
        raise _nothing_apart(model, degree)
    tokens = TokenSlices(group) if apart else None
    for path in blocks:
        _count_heads(model, path, cuts, degree)
        block = model.get_submodule(path)
        enter = partial(copied, group=group) if tokens is None or path not in apart else partial(tokens.enter, block)
        block.register_forward_pre_hook(partial(_enter, enter), with_kwargs=True)
    shared = sorted({path.rpartition(".")[2] for path, cut in cuts.items() if cut.copies > 1})
    whole = "norms" if vocabulary and cut_vocabulary(model, group) else "embedding, norms and output layer"
    notes = [f"{what}{len(cuts)} layers are cut; {whole} are whole on each"]
    if experts_of(model):
        notes += _experts().shard_experts(model, experts or group, "")
    if shared:
        notes.append(f"{what}{' and '.join(shared)} have fewer heads than processes, so each head is on several")
    while cuts:  # a whole layer goes before the next one is cut
        path, cut = cuts.popitem()
        parent, _, leaf = path.rpartition(".")
        part = _shard_of(cut, group, degree, rank, tokens if parent in apart else None)
        part = replace(part, enter=partial(copied, group=group)) if path in inside else part
        setattr(model.get_submodule(parent), leaf, ShardedLinear(cut.linear, part))
    if tokens is not None:
        tokens.attach(model, blocks, apart)
    return notes


def cut_model(
    parallel: ParallelConfig, model: PreTrainedModel, layers: dist.ProcessGroup, experts: dist.ProcessGroup,
    vocabulary: bool = True,
) -> list[str]:  # fmt: skip
    """Cut a model, or a stage of one, as a run asks: over `layers`, or its experts alone, of which it may have none.

    Args:
        layers, experts: processes that share a layer, and those that share out the experts; see `shard`.
        vocabulary: see `shard`.

    Returns:
        What the user should know.

    Raises:
        InputError: see shard and shard_experts.
    """
    if parallel.tensor > 1:
        return shard(model, layers, parallel.sequence_parallel, experts, vocabulary)
    return _experts().shard_experts(model, experts) if experts_of(model) else []


def _experts() -> Any:
    """The plug-in of models with experts."""
    return import_module("packlora.experts.cut")


def check_cut(model: PreTrainedModel, parallel: ParallelConfig) -> None:
    """Raises InputError where a model, which may be without weights, cannot be cut as a run asks: its plan or its sizes are
    none that `shard` cuts, or see check_experts."""
    shared = {"parallel.tensor": parallel.tensor, "parallel.expert": parallel.expert}
    if parallel.tensor > 1:
        _check_plan(model, parallel.tensor, parallel.sequence_parallel)
    if parallel.expert > 1 or (parallel.tensor > 1 and experts_of(model)):
        key = " times ".join(name for name, size in shared.items() if size > 1)
        _experts().check_experts(model, parallel.tensor * parallel.expert, key)


def _check_plan(model: PreTrainedModel, degree: int, sequence: bool) -> None:
    if EXPERTS in (model.tp_plan or {}).values() and not experts_of(model):
        _experts().check_experts(model, degree, "parallel.tensor")
    cuts = _cuts(model, degree)
    if sequence and not any(stands_in_layer(_block(path)) for path in cuts):
        raise _nothing_apart(model, degree)


def _nothing_apart(model: PreTrainedModel, degree: int) -> InputError:
    return InputError(
        f"{_what(degree)}of a {model.config.model_type} model nothing is cut between whose parts parallel.sequence_parallel "
        "could share the tokens; leave it out"
    )


def _what(degree: int) -> str:
    """How messages begin."""
    return f"tensor parallelism over {degree} processes: "


def _shard_of(cut: _Cut, group: dist.ProcessGroup, degree: int, rank: int, tokens: TokenSlices | None) -> Shard:
    leave: Through | None = partial(summed, group=group) if tokens is None else tokens.leave
    if cut.dim == 0:
        leave = partial(gathered, group=group) if cut.whole else None
    return Shard(
        cut.dim, rank // cut.copies, degree // cut.copies, cut.copies,
        enter=partial(split, group=group) if cut.dim == 1 and cut.whole else None,
        leave=leave,
        add_up=partial(add_up, group=group),
        by_tokens=tokens is not None and cut.dim == 1,
    )  # fmt: skip


# --- the plan ----------------------------------------------------------------------------------------------------------


def _cuts(model: PreTrainedModel, degree: int) -> dict[str, _Cut]:
    """Layers of the plan that are cut, by path."""
    what = _what(degree)
    kind, plan, head = model.config.model_type, model.tp_plan or {}, model.get_output_embeddings()
    modules, cuts, experts = dict(model.named_modules()), {}, experts_of(model)
    styles = _styles([*modules, *dict(model.named_parameters())], plan)
    latent = {_block(path) for path, style in styles.items() if style == LATENT}
    beside = beside_decoder(model)  # of images, which are not for models in parts
    for path, style in styles.items():
        module = modules.get(path)
        if style in WHOLE or path in beside or (module is not None and module is head):
            continue
        if path in experts or _block(path) in experts or _block(path) in latent:
            continue
        if style not in STYLES or type(module) is not torch.nn.Linear:
            raise InputError(
                f"{what}the plan of {kind} models has {path} as {style!r}, which this version cannot cut; it cuts linear "
                f"layers as {', '.join(STYLES)}"
            )
        dim, whole = STYLES[style]
        cuts[path] = _Cut(module, dim, whole)
    if not cuts and not experts:
        raise InputError(f"{what}transformers has no plan for {kind} models")
    return {path: _divided(model, path, cut, cuts, degree, what) for path, cut in cuts.items()}


def _block(path: str) -> str:
    """The module that has what is at a path."""
    return path.rpartition(".")[0]


def _styles(names: list[str], plan: Mapping[str, str]) -> dict[str, str]:
    """Styles by name for the modules that a pattern of the plan means; * stands for one part of a name."""
    patterns = {re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")): style for pattern, style in plan.items()}
    return {name: style for name in names for pattern, style in patterns.items() if pattern.fullmatch(name)}


def _divided(
    model: PreTrainedModel, path: str, cut: _Cut, cuts: Mapping[str, _Cut], degree: int, what: str
) -> _Cut:  # fmt: skip
    """The cut with its copies. Raises InputError where slices would be uneven."""
    size, width = _size(cut), _head_width(model, path, cut)
    count, unit = size // width, f"heads of {width}" if width > 1 else ("outputs", "inputs")[cut.dim]
    if count % degree == 0:
        if cut.dim == 1 and size // degree % 2:
            raise InputError(
                f"{what}{path} would get {size // degree} of its {size} inputs, an odd number, but dropout draws two at once"
            )
        return cut
    leaf, block = path.rpartition(".")[2], _block(path)
    others = [_size(other) // width for at, other in cuts.items() if at.rpartition(".")[0] == block and not other.dim]
    if leaf in SHARED_HEADS and width > 1 and degree % count == 0 and count < max(others):
        return _Cut(cut.linear, cut.dim, cut.whole, degree // count)
    raise InputError(f"{what}{path} has {count} {unit}, which {degree} does not divide")


def _size(cut: _Cut) -> int:
    return cut.linear.weight.shape[cut.dim]


def _head_width(model: PreTrainedModel, path: str, cut: _Cut) -> int:
    """Features that must stay together: those of a head, where a process has heads of its own."""
    width = getattr(model.get_submodule(_block(path)), "head_dim", None)
    return width if isinstance(width, int) and not cut.whole and _size(cut) % width == 0 else 1


def _count_heads(model: PreTrainedModel, block: str, cuts: Mapping[str, _Cut], degree: int) -> None:
    """Let an attention count the heads that are here."""
    module: Any = model.get_submodule(block)
    counts: dict[int, int] = {}
    for path, cut in cuts.items():
        width = _head_width(model, path, cut)
        if _block(path) == block and width > 1 and not cut.dim:
            counts[_size(cut) // width] = _size(cut) // width * cut.copies // degree
    for name in HEADS:
        if getattr(module, name, None) in counts:
            setattr(module, name, counts[getattr(module, name)])
    if counts and hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = max(counts.values()) // min(counts.values())


# --- blocks ------------------------------------------------------------------------------------------------------------


def _enter(
    enter: Through, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a block with its input as its layers read it."""
    return with_input(args, kwargs, enter)


def _check_blocks(
    model: PreTrainedModel, blocks: Mapping[str, list[str]], cuts: Mapping[str, _Cut], what: str
) -> list[str]:
    """The column-parallel layers that read what others in their block give: whole outputs, the same on all processes.

    Refuse a model where the input of a block goes elsewhere than into its column-parallel layers: the gradient from there
    would be added up too, and be as many times too large as there are processes.

    Run on the meta device, with that input cut off from the layers' own: what the block gives must not depend on it.
    """
    kind = model.config.model_type
    inputs: dict[str, torch.Tensor] = {}
    read: set[str] = set()
    others: set[str] = set()

    def opened(block: str, _: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        def leaf(x: torch.Tensor) -> torch.Tensor:
            inputs[block] = x.detach().requires_grad_()
            return inputs[block]

        return with_input(args, kwargs, leaf)

    def reads(path: str, _: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
        block = inputs[_block(path)]
        if args[0].untyped_storage()._cdata == block.untyped_storage()._cdata:
            read.add(path)
        return (args[0].detach(), *args[1:])

    def closed(block: str, _: torch.nn.Module, args: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple | list) else [output]
        if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
            others.add(block)

    hooks = [
        model.get_submodule(block).register_forward_pre_hook(partial(opened, block), with_kwargs=True)
        for block in blocks
    ]
    hooks += [model.get_submodule(block).register_forward_hook(partial(closed, block)) for block in blocks]
    paths = [path for own in blocks.values() for path in own]
    hooks += [model.get_submodule(path).register_forward_pre_hook(partial(reads, path)) for path in paths]
    run_on_meta(model, hooks, f"{what}a {kind} model")
    inside = [path for path in paths if path not in read]
    for path in inside:
        if not all(cuts[other].whole for other in blocks[_block(path)]):
            raise InputError(
                f"{what}{path} of this {kind} model does not read what its block is given; it cannot be cut"
            )
    for block in sorted(others):
        raise InputError(
            f"{what}others than the cut layers read the input of {block} in this {kind} model; it cannot be cut"
        )
    return inside
