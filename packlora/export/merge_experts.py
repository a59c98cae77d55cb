"""Adapters of experts folded into the base's files, where the experts of a layer are one tensor or each has its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from packlora.adapters.expert_layout import is_scaled
from packlora.adapters.files import tensor_key
from packlora.adapters.spec import ModuleSpec
from packlora.ops.lora_experts.types import a_by_expert, b_by_expert, turned
from packlora.ops.row_norm.row_norm import row_norm


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Part that a tensor of the files has in the weights of a layer's experts at a path.

    expert: number of the expert; None: all experts. part, parts: the tensor has rows `part` of `parts` equal ones. transposed:
    inputs come first. lies_turned: A and B have changed places, see expert_layout.SCALED.
    """

    path: str
    expert: int | None
    part: int
    parts: int
    transposed: bool
    lies_turned: bool = False

    def folded(self, stored: torch.Tensor, module: ModuleSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The tensor with the adapter in it, float32. tensors: of the adapter, by the keys of its file."""
        A, B = (tensors[tensor_key(self.path, name, module)].float() for name in "AB")
        E = A.shape[0] // module.rank
        A, B = turned(A, B, E) if self.lies_turned else (A, B)
        magnitude = tensors[tensor_key(self.path, "magnitude", module)].float() if module.use_dora else None
        out = stored.float().clone()
        for expert, W_NK in self._of_each(out, E):
            rows = len(W_NK)
            own = slice(self.part * rows, (self.part + 1) * rows)
            A_rK, B_Nr = a_by_expert(A, E)[expert], b_by_expert(B, E)[expert, own].contiguous()
            merged = torch.addmm(W_NK, B_Nr, A_rK, alpha=module.scaling)
            if magnitude is not None:
                norm_N = row_norm(W_NK.contiguous(), A_rK, B_Nr, module.scaling)
                merged *= (magnitude[expert, own] / norm_N).unsqueeze(1)
            W_NK.copy_(merged)
        return out

    def _of_each(self, out: torch.Tensor, experts: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Experts with their weight [N, K], a view."""
        for expert in range(experts) if self.expert is None else (self.expert,):
            own = out[expert] if self.expert is None else out
            yield expert, own.t() if self.transposed else own


def expert_places(
    path: str,
    experts: Any,
    keys: Mapping[str, str],
    parts: Mapping[str, list[list[str]]],
    turned_keys: Mapping[str, tuple[str, bool]],
) -> dict[str, ExpertPlace]:
    """Places of the experts by the keys of the files; empty where the layout of the experts in the files is not known.

    Args:
        experts: the module; it may be without weights.
        keys: by names of the model, those that are tensors of the files as they are.
        parts, turned_keys: see weight_files.
    """
    lies_turned = is_scaled(experts)
    transposed = lies_turned or bool(experts.is_transposed)
    if path in keys:
        return {keys[path]: ExpertPlace(path, None, 0, 1, transposed, lies_turned)}
    if path in turned_keys:
        key, is_turned = turned_keys[path]
        return {key: ExpertPlace(path, None, 0, 1, transposed != is_turned, lies_turned)}
    if transposed:
        return {}
    own = parts.get(path, [])
    return {
        key: ExpertPlace(path, expert, part, len(own), False)
        for part, by_expert in enumerate(own)
        for expert, key in enumerate(by_expert)
    }
