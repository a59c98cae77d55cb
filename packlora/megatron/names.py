"""Names of adapters in transformers' models: the layer of Megatron-Core, and the rows of it, that each name corresponds to.

Megatron-Core holds q, k and v in one layer, for each group of queries its heads, then its key, then its value; and gate and up
in one layer, one after the other. An adapter of such a layer is one of each part with the same A: an identity, so nothing is
lost. Adapters of the parts, each with an A of its own, are one of the layer with all A's above one another, of as many ranks as
they have together, and a B that is zero but for each part's own rows and ranks: an identity as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from packlora.adapters.spec import ModuleSpec
from packlora.errors import InputError

LAYER = "model.layers."
OTHERS = {
    "embedding.word_embeddings": "model.embed_tokens", "output_layer": "lm_head",
}  # fmt: skip
BLOCKS = (
    ("self_attention.linear_proj", "self_attn.o_proj"),
    ("self_attention.linear_q_proj", "self_attn.q_proj"),
    ("self_attention.linear_q_down_proj", "self_attn.q_a_proj"),
    ("self_attention.linear_q_up_proj", "self_attn.q_b_proj"),
    ("self_attention.linear_kv_down_proj", "self_attn.kv_a_proj_with_mqa"),
    ("self_attention.linear_kv_up_proj", "self_attn.kv_b_proj"),
    ("mlp.linear_fc2", "mlp.down_proj"),
    ("mlp.router", "mlp.gate"),
)
"""Names of layers that are one layer in both libraries: Megatron-Core's name within its layer, and transformers'."""


@dataclass(frozen=True, slots=True)
class Part:
    """A layer of transformers' model and its rows of Megatron-Core's layer; None: all of them."""

    name: str
    rows: torch.Tensor | None = None


def parts_of(layer: str, size: int, config: Any) -> list[Part]:
    """Parts of a layer in transformers' model, by its name, with `size` outputs over all processes. config: its
    TransformerConfig.

    Raises:
        InputError: it has no counterpart.
    """
    if layer in OTHERS:
        return [Part(OTHERS[layer])]
    head, _, rest = layer.partition("decoder.layers.")
    number, _, own = rest.partition(".")
    if head or not number.isdigit():
        raise _unknown(layer)
    at = f"{LAYER}{number}."
    if own == "self_attention.linear_qkv":
        return [Part(f"{at}self_attn.{leaf}", rows) for leaf, rows in _heads(layer, size, config)]
    for known, there in BLOCKS:
        if own == known:
            return [Part(at + there)]
    # models with multi-latent attention have another name for shared experts than others
    shared = "mlp.shared_experts." if config.multi_latent_attention else "mlp.shared_expert."
    block = {"mlp.": "mlp.", "mlp.shared_experts.": shared}.get(own.removesuffix("linear_fc1"))
    if own == "mlp.shared_experts.linear_fc2":
        return [Part(f"{at}{shared}down_proj")]
    if own.startswith("mlp.experts.local_experts."):
        expert, _, leaf = own.removeprefix("mlp.experts.local_experts.").partition(".")
        block = f"mlp.experts.{expert}."
        if leaf == "linear_fc2":
            return [Part(f"{at}{block}down_proj")]
    if own.endswith("linear_fc1") and block is not None:
        if not config.gated_linear_unit:
            return [Part(f"{at}{block}up_proj")]
        rows = torch.arange(size)
        return [Part(f"{at}{block}gate_proj", rows[: size // 2]), Part(f"{at}{block}up_proj", rows[size // 2 :])]
    raise _unknown(layer)


def _unknown(layer: str) -> InputError:
    return InputError(f"{layer} has no counterpart among transformers' layers that is known here")


def _heads(layer: str, size: int, config: Any) -> list[tuple[str, torch.Tensor]]:
    """Rows of q, k and v, in the order in which transformers has their heads."""
    groups = config.num_query_groups or config.num_attention_heads
    queries, width = config.num_attention_heads // groups, config.kv_channels
    if size != groups * (queries + 2) * width:
        raise InputError(
            f"{layer} has {size} outputs, which are not {groups} groups of {queries} queries, a key and a value of {width}"
        )
    rows = torch.arange(size).view(groups, queries + 2, width)
    return [
        ("q_proj", rows[:, :queries].reshape(-1)), ("k_proj", rows[:, queries].reshape(-1)),
        ("v_proj", rows[:, queries + 1].reshape(-1)),
    ]  # fmt: skip


# --- out --------------------------------------------------------------------------------------------------------------


def split(tensors: Mapping[str, torch.Tensor], parts: Sequence[Part]) -> dict[str, dict[str, torch.Tensor]]:
    """Split the A, B and magnitude of a whole layer into the tensors of its parts, which get memory of their own."""
    return {
        part.name: {
            key: whole.clone() if key == "A" or part.rows is None else whole[part.rows]
            for key, whole in tensors.items()
        }
        for part in parts
    }


# --- in ---------------------------------------------------------------------------------------------------------------


def fused_spec(specs: Sequence[ModuleSpec | None], shared: bool) -> ModuleSpec:
    """Specification of a layer from those of its parts; None is a part without an adapter. shared: the parts have the same
    A."""
    there = [spec for spec in specs if spec is not None]
    first = there[0]
    rank = first.rank if shared else sum(spec.rank for spec in there)
    return ModuleSpec(rank, first.scaling, first.dropout, first.use_dora, False)


def fuse(
    own: Sequence[Mapping[str, torch.Tensor] | None], specs: Sequence[ModuleSpec | None], parts: Sequence[Part], shared: bool,
    size: int,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """A, B and magnitude of a layer of `size` outputs from those of its parts. A magnitude is NaN in rows of parts without an
    adapter: the norm of the frozen row is to be put there."""
    there = [(tensors, spec, part) for tensors, spec, part in zip(own, specs, parts, strict=True) if tensors and spec]
    spec = fused_spec(specs, shared)
    first = there[0][0]
    A = first["A"] if shared else torch.cat([tensors["A"] for tensors, _, _ in there])
    B = first["B"].new_zeros(size, spec.rank)
    out = {"A": A, "B": B}
    if spec.use_dora:
        out["magnitude"] = first["B"].new_full((size,), torch.nan)
    at = 0
    for tensors, own_spec, part in there:
        rows = torch.arange(size) if part.rows is None else part.rows
        columns = slice(0, spec.rank) if shared else slice(at, at + own_spec.rank)
        B[rows, columns] = tensors["B"] * (own_spec.scaling / spec.scaling)
        if spec.use_dora:
            out["magnitude"][rows] = tensors["magnitude"]
        at += own_spec.rank
    return out


def same_A(own: Sequence[Mapping[str, torch.Tensor] | None], specs: Sequence[ModuleSpec | None]) -> bool:
    """Whether parts, those that have an adapter, have the same A, so that one serves all."""
    there = [tensors["A"] for tensors, spec in zip(own, specs, strict=True) if tensors and spec]
    return all(torch.equal(one, there[0]) for one in there[1:])
