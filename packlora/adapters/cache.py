"""Layers that read the same tokens, as one call of the operator takes them, and what a layer keeps from call to call.

Jobs' layers, PEFT's own and Megatron-Core's are kept here. What is made of the operands is the operator's business
(ops/lora_linear/prepared.py); kept here is for which layers it was made, and by what segments and plan they were computed last.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import NamedTuple

from packlora.ops.lora_linear.plan import CHAIN, Plan
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.types import Layer, Segment


class Group(NamedTuple):
    """Layers as the operator takes them, and what it keeps for them. tokens: for which segments and plan were chosen last; None
    before the first call."""

    layers: tuple[Layer, ...]
    state: GroupState
    tokens: Hashable = None
    segments: tuple[Segment, ...] = ()
    plan: Plan = CHAIN


class GroupCache:
    """The groups that one layer is the first of, the last one of each size.

    version_counted: see GroupState.
    """

    def __init__(self, version_counted: bool = False) -> None:
        self.version_counted = version_counted
        self._groups: dict[int, Group] = {}

    def of(self, layers: tuple[Layer, ...]) -> Group:
        """The group of these layers: the known one as long as they are the very same objects."""
        found = self._groups.get(len(layers))
        if found is None or not all(map(operator.is_, layers, found.layers)):
            found = self._groups[len(layers)] = Group(layers, GroupState(self.version_counted))
        return found

    def put(self, group: Group, tokens: Hashable, segments: tuple[Segment, ...], plan: Plan) -> Group:
        """The group with what was chosen for other tokens, which is kept.

        Args:
            tokens: what the segments and the plan depend on beside the layers.
        """
        group = self._groups[len(group.layers)] = Group(group.layers, group.state, tokens, segments, plan)
        return group
