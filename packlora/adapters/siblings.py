"""Siblings: linear layers that one parent module gives the same tensor, such as q, k, v or gate, up.

Two parts. `sibling_groups` finds them by watching one forward, not by a table of model classes. `SiblingGroup`, which `join`
makes, runs them: the first of a group that is called computes all, and keeps the outputs of the others for the calls that are
about to come. What "compute" is, and when a layer can take part, is its owner's business: this file knows neither PEFT nor the
operator.

A kept output is handed out only to the call that would have computed the same: the same tensor object with the same version,
under the same grad mode and autocast, inside the same forward of the parent, on a layer whose own state has not changed.
Whatever is not called for is dropped at the end of the parent's forward, also when that ends in an exception.

Layers are computed together only where the parent's forward itself calls them. A checkpoint inside of that forward will call
its layers again without the parent, so they are computed one by one both times: else a recomputation would draw other dropout
masks than its forward, and save other tensors.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
import torch.utils.checkpoint

from packlora.ops.modules import put_hooks, remove_hooks, undisturbed
from packlora.ops.stamp import traced_version

# --- finding them ------------------------------------------------------------------------------------------------------


def sibling_groups(
    model: torch.nn.Module, candidates: Collection[str], example: Mapping[str, Any]
) -> list[tuple[str, ...]]:
    """Groups of at least two of the candidates that got the same tensor object from the same parent, in order of the calls.

    Left out are modules that ran more than once, or are at several paths, and those whose counterparts in the same list of
    modules ran another number of times or on another number of tokens (experts): for them one forward does not tell about
    the next.

    Args:
        model: on any device, meta included. One forward runs in eval mode without gradients; modes and random states are
            put back.
        candidates: paths of modules of the model that take a tensor as their first argument.
        example: keyword arguments of the model.

    Raises:
        KeyError: a candidate is not a module of the model.
        Exception: whatever the forward raises.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    paths_of = Counter(id(module) for module in modules.values())
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)
    order: list[tuple[str, torch.Tensor, int]] = []
    with undisturbed(model), ExitStack() as hooks:
        for path in candidates:

            def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str = path) -> None:
                x = args[0] if args else next(iter(kwargs.values()), None)
                if isinstance(x, torch.Tensor):
                    seen[path].append(x)  # kept, so that no later tensor can have its id
                    order.append((path, x, x._version))

            hooks.enter_context(modules[path].register_forward_pre_hook(note, with_kwargs=True))
        model(**example)

    usual = {path for path in seen if len(seen[path]) == 1 and paths_of[id(modules[path])] == 1}
    usual -= _conditional(modules, candidates, seen)
    groups: dict[tuple[str, int, int], list[str]] = {}
    for path, x, version in order:
        if path in usual:
            groups.setdefault((path.rpartition(".")[0], id(x), version), []).append(path)
    return [tuple(paths) for paths in groups.values() if len(paths) > 1]


def _conditional(
    modules: Mapping[str, torch.nn.Module], candidates: Collection[str], seen: Mapping[str, list[torch.Tensor]]
) -> set[str]:
    """Candidates in a ModuleList or ModuleDict whose counterparts in its other entries, those of the same input width, ran
    another number of times or on another number of tokens."""
    counterparts: dict[tuple[str, str, int], list[tuple[str, tuple[int, int]]]] = defaultdict(list)
    for path in candidates:
        parts = path.split(".")
        inputs = seen.get(path, [])
        width = getattr(modules[path], "in_features", inputs[0].shape[-1] if inputs else -1)
        ran = (len(inputs), sum(x.numel() // max(1, x.shape[-1]) for x in inputs if x.ndim))
        for depth in range(1, len(parts)):
            container = ".".join(parts[:depth])
            if isinstance(modules[container], torch.nn.ModuleList | torch.nn.ModuleDict):
                counterparts[container, ".".join(parts[depth + 1 :]), width].append((path, ran))
    return {path for entries in counterparts.values() if len({ran for _, ran in entries}) > 1 for path, _ in entries}


# --- running them ------------------------------------------------------------------------------------------------------

_CHECKPOINTS = vars(torch.utils.checkpoint)


class MemberCall(Protocol):
    """Call that one layer would compute now."""

    @property
    def together(self) -> Hashable:
        """Only calls with equal values are computed by one call of `compute`."""

    def stamp(self) -> object:
        """Is not equal when the layer would compute something else: operands, their versions, rates."""


class TracedCall(MemberCall, Protocol):
    """A call that torch.compile may trace."""

    def operands(self) -> Sequence[torch.Tensor]:
        """All tensors that the output is computed from beside x."""

    def is_same(self, other: Any) -> bool:
        """Whether another call of the layer computes from the same operands, at the same rates."""


class Member(Protocol):
    """One layer of a group. group, index: its group, and its number there."""

    group: Any
    index: int

    def ready(self) -> Any:
        """A MemberCall, or anything that is not one (a reason, None) when the layer cannot be computed with others."""


Compute = Callable[[torch.Tensor, Sequence[Any]], Sequence[torch.Tensor]]
"""(x, calls) -> the output of every call."""


@dataclass(slots=True)
class _Pending:
    """Outputs computed and not yet called for, by member, each with the stamp of its call."""

    x: torch.Tensor
    context: Hashable
    outputs: dict[int, tuple[object, torch.Tensor]]


@dataclass(slots=True)
class _Traced:
    """The same in a graph of torch.compile: by member its call, the versions of its operands and its output; and a tensor that
    tells this graph from the next."""

    x: torch.Tensor
    mark: torch.Tensor
    context: tuple[Any, ...]
    outputs: dict[int, tuple[Any, tuple[int, ...], torch.Tensor]]


class SiblingGroup:
    """One group at run time.

    Args:
        siblings: in the order of their calls; `serve` speaks of them by number.
        compute: see Compute; one call for several siblings must give what single calls would.
        is_call: the type of their calls.
    """

    def __init__(self, siblings: Sequence[Member], compute: Compute, is_call: type) -> None:
        self.siblings = tuple(siblings)
        self.compute = compute
        self.is_call = is_call
        self._frame: FrameType | None = None
        """Frame of the parent's call which is running."""
        self._grad = False
        """Grad mode at the begin of that call."""
        self._alone: set[int] = set()
        """Members that were computed alone in it."""
        self._pending: _Pending | None = None
        self._tracing = False
        """The parent's call which is running is traced by torch.compile."""
        self._traced: _Traced | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles of a group keep no outputs."""
        return {**self.__dict__, "_frame": None, "_alone": set(), "_pending": None, "_tracing": False, "_traced": None}

    # The two hooks on the parent. Outside its forward nothing is computed ahead, so nothing can be left over.

    def attach(self, parent: torch.nn.Module) -> None:
        """Watch the parent's forward; `detach` undoes it."""
        put_hooks(parent, self._opened, self._closed)

    @staticmethod
    def detach(module: torch.nn.Module) -> None:
        """Remove the hooks of every group from a module."""
        remove_hooks(module, SiblingGroup)

    def _opened(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            if not _is_inner_graph():
                self._traced, self._tracing = None, True
            return
        self._pending = self._traced = None
        self._tracing = False
        self._frame, self._grad = sys._getframe(1), torch.is_grad_enabled()
        self._alone.clear()

    def _closed(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            if not _is_inner_graph():
                self._traced, self._tracing = None, False
            return
        self._pending = self._frame = None

    def _called_by_parent(self) -> bool:
        """Whether the parent's forward is what calls now, with no checkpoint between."""
        if self._frame is None or torch.is_grad_enabled() != self._grad:  # the latter: other libraries' checkpoints
            return False
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame is not self._frame:
            if frame.f_globals is _CHECKPOINTS:
                return False
            frame = frame.f_back
        return frame is not None

    def serve(self, index: int, x: torch.Tensor, call: MemberCall) -> torch.Tensor:
        """The output of member `index` for x: kept from an earlier sibling's call, or computed now, with its siblings'."""
        if not self._called_by_parent() or x.is_inference():  # inference tensors count no versions
            self._alone.add(index)
            return self.compute(x, (call,))[0]
        context = _context(x)
        pending = self._pending
        if pending is not None and pending.x is x and pending.context == context:
            kept = pending.outputs.pop(index, None)
            if not pending.outputs:
                self._pending = None
            if kept is not None and kept[0] == call.stamp():
                return kept[1]
            return self.compute(x, (call,))[0]
        self._pending = None
        calls: dict[int, Any] = {}
        together = call.together
        for number, member in enumerate(self.siblings):
            if number == index:
                calls[number] = call
            elif number not in self._alone:
                other: Any = member.ready()
                if isinstance(other, self.is_call) and other.together == together:  # type: ignore[attr-defined]
                    calls[number] = other
        outputs = dict(zip(calls, self.compute(x, tuple(calls.values())), strict=True))
        own = outputs.pop(index)
        if not outputs:  # a later sibling is not to compute it once more, were the others ready by then
            self._alone.add(index)
        else:
            kept_outputs = {number: (calls[number].stamp(), output) for number, output in outputs.items()}
            self._pending = _Pending(x, context, kept_outputs)
        return own

    def serve_traced(self, index: int, x: torch.Tensor, call: TracedCall) -> torch.Tensor:
        """The same for torch.compile to trace. Outputs are kept within one graph of one forward of the parent: behind a graph
        break nobody knows who wrote to x. In a graph within a graph, as a checkpoint is one, nothing may be kept."""
        if not self._tracing or _is_inner_graph():
            return self.compute(x, (call,))[0]
        context, kept = _traced_context(x), self._traced
        if kept is not None and kept.x is x and traced_version(kept.mark) == 1 and kept.context == context:
            own = kept.outputs.pop(index, None)
            if own is not None and call.is_same(own[0]) and _versions(call) == own[1]:
                return own[2]
            return self.compute(x, (call,))[0]
        calls = {index: call}
        for number in range(index + 1, len(self.siblings)):
            other = self.siblings[number].ready()
            if isinstance(other, self.is_call) and other.together == call.together:  # type: ignore[attr-defined]
                calls[number] = other  # type: ignore[assignment]
        outputs = self.compute(x, tuple(calls.values()))
        found = {n: (own, _versions(own), y) for (n, own), y in zip(calls.items(), outputs, strict=True)}
        mark = x.detach().new_empty(0).zero_()  # version 1 in this graph, 0 in the next
        self._traced = _Traced(x, mark, context, found)
        return found.pop(index)[2]


def join(
    model: torch.nn.Module, groups: Iterable[Sequence[str]], members: Mapping[str, Member],
    alike: Callable[[Any], Hashable], compute: Compute, is_call: type,
) -> list[tuple[str, ...]]:  # fmt: skip
    """Let siblings be computed together; paths by group.

    Args:
        groups: paths of siblings, in the order of their calls; those that are no members are left out.
        members: by path.
        alike: only members for which it gives the same are put in one group.
        compute, is_call: see SiblingGroup.
    """
    joined: list[tuple[str, ...]] = []
    for paths in groups:
        by_key: dict[Hashable, list[str]] = {}
        for path in paths:
            if path in members:
                by_key.setdefault(alike(members[path]), []).append(path)
        joined += [tuple(own) for own in by_key.values() if len(own) > 1]
    for own in joined:
        group = SiblingGroup([members[path] for path in own], compute, is_call)
        group.attach(model.get_submodule(own[0].rpartition(".")[0]))
        for index, member in enumerate(group.siblings):
            member.group, member.index = group, index
    return joined


def _is_inner_graph() -> bool:
    """Whether the graph of an operator is traced that is in another graph: Dynamo breaks it at a write to older objects."""
    return torch.compiler.is_dynamo_compiling() and _is_of_an_operator()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_of_an_operator() -> bool:
    return not torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output.is_root_tracer()


def _autocast(x: torch.Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind) else None


def _traced_context(x: torch.Tensor) -> tuple[Any, ...]:
    """_context of a tensor that is traced."""
    return traced_version(x), torch.is_grad_enabled(), _autocast(x)


def _versions(call: TracedCall) -> tuple[int, ...]:
    return tuple(traced_version(operand) for operand in call.operands())


def _context(x: torch.Tensor) -> Hashable:
    """Context that an output depends on beside the layer and the tensor object."""
    stream = torch._C._cuda_getCurrentRawStream(x.device.index) if x.device.type == "cuda" else None
    return (x._version, x.requires_grad, torch.is_grad_enabled(), _autocast(x), stream)
