"""Layers with the names, attributes and calls that Megatron-Core's layers around Transformer Engine have, in plain torch.

Transformer Engine needs a GPU to be installed. What stands here is what packlora.megatron asks of its layers; the products and
the messages are those of Megatron-Core.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec


class _Base(torch.nn.Module):
    """tp_size and tp_group are those that the library knows of; parallel_mode is None where others talk."""

    def __init__(self, inputs: int, outputs: int, config: Any, mode: str, expert: bool, group: Any) -> None:
        super().__init__()
        size = 1 if group is None else dist.get_world_size(group)
        self.config, self._tp_group = config, group
        self.in_features, self.out_features = (
            inputs // (size if mode == "row" else 1),
            outputs // (size if mode == "column" else 1),
        )
        alone = expert and (size > 1 or config.expert_model_parallel_size > 1)
        self.parallel_mode = None if alone else mode
        self.tp_group, self.tp_size = (None, 1) if alone else (group, size)
        self.sequence_parallel = config.sequence_parallel and size > 1
        self.te_return_bias = self.use_bias = False

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        mode = self.parallel_mode if self.tp_size > 1 else None
        if mode == "column":
            enter = mappings.gather_from_sequence_parallel_region if self.sequence_parallel else None
            x = mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group) if enter is None else enter(
                x, group=self.tp_group
            )  # fmt: skip
        y = torch.nn.functional.linear(x, weight)
        if mode == "row":
            leave = mappings.reduce_scatter_to_sequence_parallel_region
            leave = leave if self.sequence_parallel else mappings.reduce_from_tensor_model_parallel_region
            y = leave(y, group=self.tp_group)
        return y


class TELinear(_Base):
    mode = "duplicated"

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, is_expert: bool = False, tp_group: Any = None, **_: Any
    ) -> None:
        from megatron.core.utils import get_tensor_model_parallel_group_if_none

        group = get_tensor_model_parallel_group_if_none(tp_group, is_expert=is_expert)
        super().__init__(input_size, output_size, config, self.mode, is_expert, group)
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features))
        self.bias = torch.Tensor()  # the library's way of saying none

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self._product(x, self.weight), None


class TEColumnParallelLinear(TELinear):
    mode = "column"


class TERowParallelLinear(TELinear):
    mode = "row"


class TELayerNormColumnParallelLinear(TEColumnParallelLinear):
    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(input_size))
        self.normalization, self.eps, self.zero_centered_gamma = "RMSNorm", 1e-5, False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = torch.nn.functional.rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps)
        return super().forward(x)


class TEGroupedLinear(_Base):
    mode = "column"

    def __init__(self, num_gemms: int, input_size: int, output_size: int, config: Any, pg_collection: Any) -> None:
        super().__init__(input_size, output_size, config, self.mode, True, pg_collection.expt_tp)
        self.num_gemms, self._pg_collection = num_gemms, pg_collection
        self.explicit_expert_comm = self.parallel_mode is None
        for at in range(num_gemms):
            self.register_parameter(f"weight{at}", torch.nn.Parameter(torch.empty(self.out_features, self.in_features)))

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, None]:
        own = x.split(m_splits)
        return torch.cat([self._product(part, getattr(self, f"weight{at}")) for at, part in enumerate(own)]), None


class TEColumnParallelGroupedLinear(TEGroupedLinear):
    mode = "column"


class TERowParallelGroupedLinear(TEGroupedLinear):
    mode = "row"


class GroupedExperts(torch.nn.Module):
    """Gated experts of two grouped layers."""

    def __init__(self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None) -> None:
        super().__init__()
        self.config, self.num_local_experts, self.ep_group = config, num_local_experts, pg_collection.ep
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = TEColumnParallelGroupedLinear(num_local_experts, hidden, 2 * inner, config, pg_collection)
        self.linear_fc2 = TERowParallelGroupedLinear(num_local_experts, inner, hidden, config, pg_collection)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        splits = counts.tolist()
        gate, up = self.linear_fc1(rows, splits)[0].chunk(2, -1)
        y, _ = self.linear_fc2(torch.nn.functional.silu(gate) * up * probs[:, None], splits)
        return y, None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding

        out = {}
        for name, module in self.named_children():
            own = module.sharded_state_dict(f"{name}.", sharded_offsets, metadata)
            replace_prefix_for_sharding(own, f"{name}.", f"{prefix}experts.{name}.")
            out |= {f"{prefix}{key}": value for key, value in own.items()}
        return out


class NormAndMix(torch.nn.Module):
    """In the place of a norm: one with a layer behind it that every process has whole, as down-projections of attention are."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(hidden_size)), eps
        self.mix = TELinear(hidden_size, hidden_size, config=config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mix(torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps))[0]
        return y


def use_stand_ins(spec: Any) -> None:
    """Put these layers into a layer's specification, norms into their linear layers as Transformer Engine's have them."""
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
    attention.linear_qkv, attention.linear_proj = TELayerNormColumnParallelLinear, TERowParallelLinear
    spec.submodules.input_layernorm = IdentityOp
    if hasattr(mlp, "experts"):
        mlp.experts = ModuleSpec(module=GroupedExperts)
        own = mlp.shared_experts.submodules
        own.linear_fc1, own.linear_fc2 = TEColumnParallelLinear, TERowParallelLinear
    else:
        mlp.linear_fc1, mlp.linear_fc2 = TELayerNormColumnParallelLinear, TERowParallelLinear
        spec.submodules.pre_mlp_layernorm = IdentityOp
