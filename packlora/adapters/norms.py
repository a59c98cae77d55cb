"""DoRA's norms, kept from one optimizer step to the next: over microbatches, recomputation in backward, and evaluation.

A norm depends on W, A, B and the scaling alone. RowNorms keeps those of a model, and goes by one rule: a norm stands while

    the host sees what it saw     at every get(), in microseconds: places, shapes and version counters of W, A and B (of a W
                                  that is no tensor, or is gathered, its key), the scaling, invalidate(), and steps of torch's
                                  optimizers (the fused ones move no version counter), for version-counted handles of one that
                                  holds A or B
    its data are what they were   which shows any write that leaves no trace on the host: through .data, a NumPy view, a kernel.
                                  Never asked of version-counted handles. On a CPU A and B are compared with copies; on a GPU
                                  64-bit sums over their bits are compared on the device, and kernels compute where they differ:
                                  nothing waits. Of W 8 elements of every row are looked at, which shows a merge, an unmerge,
                                  another quantisation, a row set to zero; a write through .data to a few others it does not
                                  show: then call invalidate()

A window (RowNorms.open and close; packlora.accelerate puts them around a model's forward) is a time in which nobody writes to A
or B unseen: data are looked at once in it, those on a GPU all together at its first get(). Outside of windows every get() looks
at the data of its own handle. A CUDA graph that is captured contains the check and the computation of the window, or the
computation of a single handle: what is kept has no part in it.

A version-counted handle is for owners who change A and B only by torch's optimizers and in-place operations.

Shapes: N outputs, K inputs, r rank.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch._dynamo.eval_frame import skip_code
from torch.optim.optimizer import register_optimizer_step_post_hook

from packlora.adapters.norm_operands import Check, NormOperands, Seen, Together
from packlora.ops.lora_linear.frozen import FrozenWeight
from packlora.ops.modules import remove_hooks
from packlora.ops.row_norm.row_norm import plainly, row_norms

T = TypeVar("T")
_NUMBERS = itertools.count()
_LIVE: weakref.WeakValueDictionary[int, RowNorms] = weakref.WeakValueDictionary()
_OPERANDS = ("norms", "weight", "A", "B", "scaling", "version_counted", "add_up")


def _alive(known: weakref.WeakValueDictionary[int, T]) -> list[T]:
    """The values, while other threads may add some: values() would fail then."""
    return [value for reference in known.valuerefs() if (value := reference()) is not None]


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for handle in (handle for norms in _alive(_LIVE) for handle in _alive(norms._handles)):
        if not handle.version_counted or id(handle.A) in held or id(handle.B) in held:
            handle._steps += 1


register_optimizer_step_post_hook(_after_step)


class NormHandle(NormOperands):
    """One module's norm. Belongs to the layer and dies with it.

    Args:
        norms: of the model.
        version_counted: see the module's docstring for what this promises.
        add_up: adds up a tensor over the processes that hold slices of W's columns, in place. All of them compute the same
            norms at the same time, and only of version-counted handles: the data of one process are no reason for others.
    """

    def __init__(
        self, norms: RowNorms, weight: torch.Tensor | FrozenWeight, A: torch.Tensor, B: torch.Tensor, scaling: float,
        version_counted: bool = False, add_up: Callable[[torch.Tensor], None] | None = None,
    ) -> None:  # fmt: skip
        assert add_up is None or version_counted
        self.norms, self.version_counted, self.add_up = norms, version_counted, add_up
        super().__init__(weight, A, B, scaling)
        self._register()

    def _register(self) -> None:
        self._asked = self.norms._window
        """The last window in which get() was called, or when it was made."""
        self._kept: _Kept | None = None
        self._check: Check | None = None
        """Check of this handle alone."""
        self.norms._handles[self.number] = self

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OPERANDS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._look_anew()
        self._register()

    def get(self) -> torch.Tensor:
        """||W + s B A|| by row for the present values, [N], float32 (float64 of float64), no gradient. Do not write to it.

        While a CUDA graph is being captured, the computation becomes part of the graph, whatever the handle is.

        Raises:
            RuntimeError: an operand is not whole here (sharded, or its storage is freed).
        """
        norms = self.norms
        self._asked = norms._window
        if norms._open and norms._checked != norms._window:
            since, norms._checked = norms._checked, norms._window
            norms._check_window(since)
        if _capturing():
            return norms._in_graph(self)
        kept = self._kept
        looked = self.version_counted or (norms._open and kept is not None and kept.window == norms._window)
        if kept is None or not looked or not kept.seen.stands(self):
            self._renew()
            kept = self._kept
        assert kept is not None
        return kept.norm_N if kept.event is None else kept.norm_on_this_stream()

    def _renew(self) -> None:
        """Look at the data, or at all that is version-counted, and compute what does not stand."""
        if missing := self._missing():
            raise RuntimeError(f"the norm of W + s B A needs its operands whole: {missing}")
        kept, window = self._kept, self.norms._window
        if self.version_counted:
            self.norms._renew(self)
        elif self._on_device():
            check, self._check, self._kept = self._check, None, None  # until it has succeeded
            if check is None or not check.sights[0].follows(self):
                check = Check([self])
            _keep([self], check.norms(), check.sights)
            self._check = check
        elif kept is not None and kept.seen.stands(self) and kept.is_of(self):
            kept.window = window
        else:
            _keep([self], row_norms([self._problem()]))


class RowNorms:
    """The norms of a model. It knows its handles, and does not keep them alive."""

    def __init__(self) -> None:
        self._handles: weakref.WeakValueDictionary[int, NormHandle] = weakref.WeakValueDictionary()
        self._open = False
        self._window = self._checked = 0
        """Number of the last window that was opened, and of the last one in which the data were checked."""
        self._together: Together | None = None
        """Checks of the last window."""
        self._captured: dict[int, Check] = {}
        """Checks whose addresses a graph has, by id."""
        self._in_window: dict[int, torch.Tensor] = {}
        """Results of this window's check while a graph was being captured, by handle."""
        _LIVE[next(_NUMBERS)] = self

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def invalidate(self) -> None:
        """The next get() of every handle computes."""
        for handle in _alive(self._handles):
            handle.invalidate()

    def changed(self) -> None:
        """A's and B's may be others, which the host need not have seen: the next get() of every handle computes."""
        for handle in _alive(self._handles):
            handle._steps += 1

    # --- windows ---------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin of a window, whether or not the last one was closed: an interrupted forward closes nothing."""
        self._open = True
        self._window += 1
        self._in_window = {}

    def close(self) -> None:
        """End of a window."""
        self._open = False
        self._in_window = {}

    def attach(self, module: torch.nn.Module) -> None:
        """A window around every forward of a module; `detach` undoes it."""
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    @staticmethod
    def detach(module: torch.nn.Module) -> None:
        """Remove the hooks of every RowNorms from a module."""
        remove_hooks(module, RowNorms)

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.open()

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.close()

    # the hooks of the module that is compiled itself run beside its graph; compiled each alone, they would be graphs without
    # operations whose guards are checked at every call. Within a graph they are traced as before
    for _hook in (_before, _after):
        skip_code(_hook.__code__)

    # --- the rule ----------------------------------------------------------------------------------------------------------

    def _check_window(self, since: int) -> None:
        """Check the data on devices of handles that are in use: get() was called since the window with this number."""
        handles = [handle for handle in _alive(self._handles) if not handle.version_counted and handle._asked >= since]
        capturing, together = _capturing(), self._together
        if together is None or not together.fits(handles):
            if capturing:  # new tables cannot be captured
                return
            together = self._together = None  # its memory may be needed
            together = Together.of(handles)
        self._together = None  # until all checks have succeeded
        for check in together.checks:
            norms = check.norms()
            if capturing:
                self._captured[id(check)] = check
                self._in_window.update(zip(check.numbers, norms, strict=True))
            else:
                _keep([self._handles[number] for number in check.numbers], norms, check.sights)
        self._together = together

    def _renew(self, handle: NormHandle) -> None:
        """Compute the norm of a version-counted handle, and those others that do not stand. Where it is new, those that are
        new: adapters are made one after the other, and each would look at all before it."""
        is_new = handle._kept is None
        others = [
            other for other in _alive(self._handles)
            if (other._kept is None or not is_new) and other is not handle and other.version_counted
            and other.A.device == handle.A.device and (other._kept is None or not other._kept.seen.stands(other))
            and other._missing() is None
        ]  # fmt: skip
        members = [handle, *others]
        _keep(members, _added_up(members, row_norms([member._problem() for member in members])))

    def _in_graph(self, handle: NormHandle) -> torch.Tensor:
        """Part of the graph: nothing of it is kept, since a replay changes it behind the host's back. Outside of a window that
        was checked before, the graph computes the norm at each replay."""
        if (norm_N := self._in_window.get(handle.number)) is not None:
            return norm_N
        return _added_up([handle], row_norms([handle._operands()], in_graph=True))[0]


def _added_up(handles: Sequence[NormHandle], norms: list[torch.Tensor]) -> list[torch.Tensor]:
    """The norms of whole rows, where handles have slices of them: the root of the squares' sum over the processes."""
    at = [index for index, handle in enumerate(handles) if handle.add_up is not None]
    if not at:
        return norms
    add_up = handles[at[0]].add_up
    assert add_up is not None
    with plainly(norms[0].device):
        squares = torch.cat([norms[index] for index in at]).square_()
        add_up(squares)
        wholes = squares.sqrt_().split([len(norms[index]) for index in at])
    for index, whole_N in zip(at, wholes, strict=True):
        norms[index] = whole_N
    return norms


@dataclass(slots=True)
class _Kept:
    """A norm, and what it was computed from. window: in which its data were last seen."""

    norm_N: torch.Tensor
    seen: Seen
    window: int
    copies: tuple[torch.Tensor, ...] | None
    stream: int
    event: Any

    def is_of(self, handle: NormHandle) -> bool:
        """Whether the data are those that it was computed from, as far as the host can say without waiting for a device."""
        if self.copies is None:
            return False
        return all(torch.equal(now, then) for now, then in zip(handle._data(), self.copies, strict=True))

    def norm_on_this_stream(self) -> torch.Tensor:
        if self.event is not None and _stream(self.norm_N) != self.stream:
            current = torch.cuda.current_stream(self.norm_N.device)
            current.wait_event(self.event)
            self.norm_N.record_stream(current)
        return self.norm_N


def _keep(handles: Sequence[NormHandle], norms: Sequence[torch.Tensor], sights: Sequence[Seen] | None = None) -> None:
    """Keep norms of handles on one device. sights: what the host saw of them, where a check has it up to date."""
    event, stream = None, _stream(norms[0])
    if norms[0].is_cuda:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(norms[0].device))
    for at, (handle, norm_N) in enumerate(zip(handles, norms, strict=True)):
        before, copies = handle._kept, None
        if sights is not None:
            seen = sights[at]
        else:
            seen = before.seen if before is not None and before.seen.follows(handle) else Seen(handle)
            if not handle.version_counted and handle.A.device.type == "cpu":
                copies = tuple(tensor.clone() for tensor in handle._data())
        handle._kept = _Kept(norm_N, seen, handle.norms._window, copies, stream, event)


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _stream(tensor: torch.Tensor) -> int:
    return int(torch._C._cuda_getCurrentRawStream(tensor.device.index)) if tensor.is_cuda else 0
