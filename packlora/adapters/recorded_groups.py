"""Groups of layers in calls that are recorded: with the adapters alone that may own their tokens.

Other adapters may leave while what was recorded serves on, and it would keep their weights.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from packlora.adapters.cache import GroupCache
from packlora.adapters.owners import TokenOwners
from packlora.ops.lora_linear.prepared import same_layer
from packlora.ops.lora_linear.types import Layer


class Member(Protocol):
    """A layer with adapters (linear.AdaptedLinear)."""

    attached: Any
    groups: GroupCache

    def layer(self) -> Layer:
        """The layer and all its adapters as the operator takes them."""


class _Cache(GroupCache):
    """Groups of what is recorded, which may be those of another cache too."""

    def share(self, layers: tuple[Layer, ...], other: GroupCache) -> None:
        """Have the group of these layers that another cache has, unless it is known here."""
        found = self._groups.get(len(layers))
        if found is None or not all(map(operator.is_, layers, found.layers)):
            self._groups[len(layers)] = other.of(layers)


class RecordedGroups:
    """Groups of a model for some of its adapters. All that is recorded for the same adapters shares one, and its operands; with
    what is not recorded too, while there are no other adapters.

    adapters: their numbers. version_counted: see GroupState.
    """

    def __init__(self, adapters: frozenset[int], version_counted: bool) -> None:
        self._adapters, self._version_counted = adapters, version_counted
        self._layers: dict[Member, Layer] = {}
        self._caches: dict[Member, _Cache] = {}

    def layer(self, member: Member) -> Layer:
        """A layer with these adapters: the same object as long as it has the very same operands."""
        own, known = member.layer(), self._layers.get(member)
        if not own.adapters.keys() <= self._adapters:
            own = replace(own, adapters={n: low for n, low in own.adapters.items() if n in self._adapters})
        if known is None or not same_layer(own, known):
            known = self._layers[member] = own
        return known

    def cache(self, members: Sequence[Member], layers: tuple[Layer, ...]) -> GroupCache:
        """Cache of the groups of these siblings, the same one each time: what is recorded finds what was made before. It is not
        the siblings' own, which holds groups with other adapters too.

        Args:
            layers: the siblings' own.
        """
        first = members[0]
        found = self._caches.get(first)
        if found is None:
            found = self._caches[first] = _Cache(self._version_counted)
        if all(own is member.layer() for own, member in zip(layers, members, strict=True)):
            found.share(layers, first.groups)
        return found


def cached(owners: TokenOwners, members: Sequence[Member]) -> tuple[GroupCache, tuple[Layer, ...]]:
    """The cache of a group, and its layers, for a call that is recorded with these owners."""
    attached = members[0].attached
    groups = attached.recorded.get(owners.adapters)
    if groups is None:
        groups = attached.recorded[owners.adapters] = RecordedGroups(owners.adapters, attached.version_counted)
    owners.recorded[attached] = groups  # as long as the owners are there
    layers = tuple([groups.layer(member) for member in members])
    return groups.cache(members, layers), layers
