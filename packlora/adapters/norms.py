"""DoRA's norms, kept from one optimizer step to the next: over microbatches, recomputation in backward, and evaluation.

A norm depends on W, A, B and the scaling alone. RowNorms keeps those of a model, and goes by one rule: a norm stands while

    its stamp is what it was      what the host sees at every get(), in microseconds: places, shapes and version counters of W,
                                  A and B, the scaling, invalidate(), and steps of torch's optimizers (the fused ones move no
                                  version counter), for version-counted handles of one that holds A or B
    its data are what they were   which shows any write that leaves no trace on the host: through .data, a NumPy view, a kernel.
                                  Never asked of version-counted handles. On a CPU A and B are compared with copies; on a GPU
                                  64-bit sums over their bits are compared on the device, and kernels compute where they differ:
                                  nothing waits. Of W 8 elements of every row are looked at, which shows a merge, an unmerge,
                                  another quantisation, a row set to zero; a write through .data to a few others it does not
                                  show: then call invalidate()

A window (RowNorms.open and close; packlora.accelerate puts them around a model's forward) is a time in which nobody writes to A
or B unseen: the data of all handles are checked together, at its first get(), and not again. Outside of windows every get()
checks those of its own handle. A CUDA graph that is captured contains the check and the computation of the window, or the
computation of a single handle: what is kept has no part in it.

A version-counted handle is for owners who change A and B only by torch's optimizers and in-place operations.

Shapes: N outputs, K inputs, r rank.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from packlora.ops.modules import remove_hooks
from packlora.ops.row_norm.row_norm import row_norms, squared_row_norm, takes_kernels
from packlora.ops.row_norm.types import NormProblem, RowChunks
from packlora.ops.stamp import PLAIN, place, version

_NUMBERS = itertools.count()
_LIVE: weakref.WeakSet[RowNorms] = weakref.WeakSet()

Place = tuple[Any, ...]
"""Of a handle: the scaling, where A, B and W lie, and W's version."""
Stamp = tuple[Place, tuple[Any, ...]]
"""The place, and what tells of writes to A and B."""


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for norms in tuple(_LIVE):
        norms._stepped(optimizer)


register_optimizer_step_post_hook(_after_step)


class NormHandle:
    """One module's norm. Made by RowNorms.add; belongs to the layer and dies with it."""

    def __init__(
        self, norms: RowNorms, weight: torch.Tensor | RowChunks, A: torch.Tensor, B: torch.Tensor, scaling: float,
        version_counted: bool,
    ) -> None:  # fmt: skip
        self.norms, self.weight, self.A, self.B, self.scaling, self.version_counted = (
            norms,
            weight,
            A,
            B,
            scaling,
            version_counted,
        )
        self._register()

    def _register(self) -> None:
        self.number = next(_NUMBERS)
        self._epoch = self._steps = 0
        self._asked = self.norms._window
        """The last window in which get() was called, or when it was made."""
        self._kept: _Kept | None = None
        self._check: _Check | None = None
        """Of this handle alone."""
        self._base: tuple[Place, tuple[StorageWeakRef, ...], torch.Tensor] | None = None
        self.norms._handles[self.number] = self

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("norms", "weight", "A", "B", "scaling", "version_counted")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    def point(self, weight: torch.Tensor | RowChunks, A: torch.Tensor, B: torch.Tensor, scaling: float) -> NormHandle:
        """These are the operands from now on; free where they are the same objects. For layers whose parameters may be
        replaced: call it before get()."""
        if weight is not self.weight or A is not self.A or B is not self.B:
            self.weight, self.A, self.B = weight, A, B
            self.invalidate()
        self.scaling = scaling
        return self

    def get(self) -> torch.Tensor:
        """||W + s B A|| by row for the present values, [N], float32 (float64 of float64), no gradient. Do not write to it.

        While a CUDA graph is being captured, the computation becomes part of the graph, whatever the handle is.

        Raises:
            RuntimeError: an operand is not whole here (sharded, or its storage is freed).
        """
        return self.norms._get(self)

    def invalidate(self) -> None:
        """The next get() computes, also ||W||^2."""
        self._epoch += 1

    def stamp(self) -> Stamp:
        """All that the host can see of the operands."""
        A, B = self.A, self.B
        return (float(self.scaling), place(A), place(B), self._frozen()), (self._steps, version(A), version(B))

    def _frozen(self) -> Place:
        if isinstance(self.weight, torch.Tensor):
            return (self._epoch, place(self.weight), version(self.weight))
        return (self._epoch, *((place(source), version(source)) for source in self._sources()))

    def _sources(self) -> tuple[torch.Tensor, ...]:
        return self.weight.tensors if isinstance(self.weight, RowChunks) else (self.weight,)

    def _storages(self) -> tuple[StorageWeakRef, ...]:
        return tuple(StorageWeakRef(t.untyped_storage()) for t in (self.A, self.B, *self._sources()))

    def _base_N(self) -> torch.Tensor:
        """||W||^2 by row."""
        frozen = self._frozen()
        if self._base is None or self._base[0] != frozen:
            self._base = (frozen, self._storages(), squared_row_norm(self.weight))
        return self._base[2]

    def _problem(self) -> NormProblem:
        problem = NormProblem(self.weight, self.A, self.B, self.scaling)
        if takes_kernels(problem) or isinstance(self.weight, RowChunks):
            return NormProblem(self.weight, self.A, self.B, self.scaling, self._base_N())
        return problem

    def _on_device(self) -> bool:
        """Whether the check of its data and the computation are kernels."""
        return (
            not self.version_counted and isinstance(self.weight, torch.Tensor)
            and takes_kernels(NormProblem(self.weight, self.A, self.B, self.scaling))
            and self.A.is_contiguous() and self.B.is_contiguous()
        )  # fmt: skip

    def _missing(self) -> str | None:
        """Which operand is not whole here."""
        named = [("A", self.A), ("B", self.B), *(("weight", source) for source in self._sources())]
        for name, operand in named[: 2 if isinstance(self.weight, RowChunks) else 3]:
            if type(operand) not in PLAIN:
                return f"{name} is a {type(operand).__name__}, not a torch.Tensor"
            if operand.numel() and not operand.untyped_storage().size():
                return f"the storage of {name} is freed"
        return None


class RowNorms:
    """The norms of a model. It knows its handles, and does not keep them alive."""

    def __init__(self) -> None:
        self._handles: weakref.WeakValueDictionary[int, NormHandle] = weakref.WeakValueDictionary()
        self._open = False
        self._window = self._checked = 0
        """Number of the last window that was opened, and of the last one in which the data were checked."""
        self._together: _Together | None = None
        """What the last window checked."""
        self._captured: dict[int, _Check] = {}
        """Checks whose addresses a graph has, by id."""
        self._in_window: dict[int, torch.Tensor] = {}
        """By handle, what this window's check gave while a graph was being captured."""
        _LIVE.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def add(
        self,
        weight: torch.Tensor | RowChunks,
        A: torch.Tensor,
        B: torch.Tensor,
        scaling: float,
        version_counted: bool = False,
    ) -> NormHandle:
        """weight [N, K], A [r, K], B [N, r]; see the module's docstring for what `version_counted` promises."""
        return NormHandle(self, weight, A, B, scaling, version_counted)

    def invalidate(self) -> None:
        """The next get() of every handle computes."""
        for handle in list(self._handles.values()):
            handle.invalidate()

    # --- windows ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def checked(self) -> Iterator[None]:
        """A window around something, such as a forward. What the host sees is still looked at by every get()."""
        self.open()
        try:
            yield
        finally:
            self.close()

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

    # --- the rule ----------------------------------------------------------------------------------------------------------

    def _get(self, handle: NormHandle) -> torch.Tensor:
        handle._asked = self._window
        if self._open and self._checked != self._window:
            since, self._checked = self._checked, self._window
            self._check_window(since)
        if _capturing():
            return self._in_graph(handle)
        kept = handle._kept
        if kept is None or kept.stamp != handle.stamp():
            if missing := handle._missing():
                raise RuntimeError(f"the norm of W + s B A needs its operands whole: {missing}")
            self._renew(handle, stale=True)
        elif not (handle.version_counted or (self._open and kept.window == self._window)):
            self._renew(handle, stale=False)
        assert handle._kept is not None
        return handle._kept.norm_on_this_stream()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for handle in list(self._handles.values()):
            if not handle.version_counted or id(handle.A) in held or id(handle.B) in held:
                handle._steps += 1

    def _check_window(self, since: int) -> None:
        """Check the data of handles that are in use: get() was called since the window with this number."""
        handles = [handle for handle in self._handles.values() if not handle.version_counted and handle._asked >= since]
        stamps = {handle.number: handle.stamp() for handle in handles}
        places = [(number, stamp[0]) for number, stamp in stamps.items()]
        capturing = _capturing()
        if self._together is None or self._together.places != places:
            if capturing:  # new tables cannot be captured
                return
            self._together = None
            self._together = _Together.of(handles, places)
        for check in self._together.checks:
            norms = check.norms()
            if capturing:
                self._captured[id(check)] = check
                self._in_window.update(zip(check.numbers, norms, strict=True))
            else:
                self._keep([self._handles[number] for number in check.numbers], norms, stamps)
        if self._together.others and not capturing:
            self._compute([self._handles[number] for number in self._together.others])

    def _renew(self, handle: NormHandle, stale: bool) -> None:
        """Bring a handle up to date; where its stamp is stale, also those others that are computed in the same way."""
        if handle._on_device():
            if handle._check is None or handle._check.places != [(handle.number, handle.stamp()[0])]:
                handle._check = _Check([handle])
            self._keep([handle], handle._check.norms())
            return
        others = [
            other for other in self._handles.values()
            if stale and other is not handle and other.A.device == handle.A.device
            and other.version_counted == handle.version_counted
            and (other._kept is None or other._kept.stamp != other.stamp())
            and other._missing() is None and not other._on_device()
        ]  # fmt: skip
        self._compute([handle, *others])

    def _compute(self, handles: Sequence[NormHandle]) -> None:
        """Compute those that do not stand, by one call for each device."""
        stale: dict[torch.device, list[NormHandle]] = {}
        for handle in handles:
            kept = handle._kept
            if kept is not None and kept.stamp == handle.stamp() and kept.is_of(handle):
                kept.window = self._window
            else:
                stale.setdefault(handle.A.device, []).append(handle)
        for members in stale.values():
            self._keep(members, row_norms([handle._problem() for handle in members]))

    def _keep(
        self, handles: Sequence[NormHandle], norms: Sequence[torch.Tensor], stamps: Mapping[int, Stamp] | None = None
    ) -> None:
        """Of handles on one device; stamps: by number, where they are known."""
        event = None
        if norms[0].is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(norms[0].device))
        stream = _stream(norms[0])
        for handle, norm_N in zip(handles, norms, strict=True):
            stamp, kept = handle.stamp() if stamps is None else stamps[handle.number], handle._kept
            copies = None
            if not handle.version_counted and handle.A.device.type == "cpu" and not handle._on_device():
                copies = tuple(tensor.clone() for tensor in _data(handle))
            same = kept is not None and kept.stamp[0] == stamp[0]
            storages = kept.storages if same and kept is not None else handle._storages()
            handle._kept = _Kept(norm_N, stamp, storages, self._window, copies, stream, event)

    def _in_graph(self, handle: NormHandle) -> torch.Tensor:
        """Part of the graph: nothing of it is kept, since a replay changes it behind the host's back. Outside of a window that
        was checked before, the graph computes the norm at each replay, without kernels, whose tables cannot be captured."""
        if (norm_N := self._in_window.get(handle.number)) is not None:
            return norm_N
        return row_norms([NormProblem(handle.weight, handle.A, handle.B, handle.scaling)], kernels=False)[0]


@dataclass(slots=True)
class _Kept:
    """A norm, and what it was computed from."""

    norm_N: torch.Tensor
    stamp: Stamp
    storages: tuple[StorageWeakRef, ...]
    window: int
    """In which its data were last seen."""
    copies: tuple[torch.Tensor, ...] | None
    stream: int
    event: Any

    def is_of(self, handle: NormHandle) -> bool:
        """Whether the data are those that it was computed from, as far as the host can say without waiting for a device."""
        if handle.version_counted:
            return True
        if self.copies is None:
            return False
        return all(torch.equal(now, then) for now, then in zip(_data(handle), self.copies, strict=True))

    def norm_on_this_stream(self) -> torch.Tensor:
        if self.event is not None and _stream(self.norm_N) != self.stream:
            current = torch.cuda.current_stream(self.norm_N.device)
            current.wait_event(self.event)
            self.norm_N.record_stream(current)
        return self.norm_N


class _Check:
    """Modules whose data are checked and whose norms are computed on the device, in one batch.

    It serves while they are where they were. After a change of a frozen weight that the host sees, base_N is another tensor, at
    another address (the old one is held here), and the modules get another _Check, which has seen nothing yet.
    """

    def __init__(self, handles: Sequence[NormHandle]) -> None:
        from packlora.ops.row_norm.triton_path import batch_of

        self.places = [(handle.number, handle.stamp()[0]) for handle in handles]
        self.numbers = [handle.number for handle in handles]
        self.batch = batch_of([handle._problem() for handle in handles])
        device = handles[0].A.device
        self.seen = torch.zeros(len(handles), 5, dtype=torch.int64, device=device)
        self.kept = torch.empty(sum(self.batch.sizes), dtype=torch.float32, device=device)
        self.bases = [handle._base_N() for handle in handles]
        self.storages = [handle._storages() for handle in handles]

    def norms(self) -> list[torch.Tensor]:
        """Of all of them, computed where the data changed."""
        with torch.inference_mode(False):  # they are saved for backwards
            return self.batch.split(self.batch.run(self.batch.stale(self.seen), self.kept))


@dataclass(frozen=True, slots=True)
class _Together:
    """What a window checks: by the places of its handles, the checks on devices and the numbers of the others."""

    places: list[tuple[int, Place]]
    checks: list[_Check]
    others: list[int]

    @classmethod
    def of(cls, handles: Sequence[NormHandle], places: list[tuple[int, Place]]) -> _Together:
        whole = [handle for handle in handles if handle._missing() is None]
        on_device = [handle for handle in whole if handle._on_device()]
        checks = []
        if on_device:
            from packlora.ops.row_norm.tables import batches

            for indices in batches([handle._problem() for handle in on_device]):
                checks.append(_Check([on_device[index] for index in indices]))
        checked = {number for check in checks for number in check.numbers}
        return cls(places, checks, [handle.number for handle in whole if handle.number not in checked])


def _data(handle: NormHandle) -> tuple[torch.Tensor, ...]:
    """What is compared on a CPU: A, B and 8 elements of each row of W."""
    weight = handle.weight
    if isinstance(weight, RowChunks):
        return handle.A.detach(), handle.B.detach()
    N, K = weight.shape
    starts = torch.arange(N).mul_(40503).remainder_(max(K // 8, 1)).mul_(8)
    cols = (starts[:, None] + torch.arange(min(8, K))).to(weight.device)
    return handle.A.detach(), handle.B.detach(), weight.detach().gather(1, cols)


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _stream(tensor: torch.Tensor) -> int:
    return int(torch.cuda.current_stream(tensor.device).cuda_stream) if tensor.is_cuda else 0


# --- in compiled graphs ------------------------------------------------------------------------------------------------


@torch.library.custom_op("packlora::row_norm", mutates_args=())
def row_norm_op(weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor, scaling: float) -> torch.Tensor:
    """||W + s B A|| by row, [N], for torch.compile: computed at every call, since what is kept in Python would be frozen into
    CUDA graphs."""
    return row_norms([NormProblem(weight_NK, A_rK, B_Nr, scaling)])[0]


@row_norm_op.register_fake
def _(weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor, scaling: float) -> torch.Tensor:
    wide = torch.float64 in (weight_NK.dtype, A_rK.dtype, B_Nr.dtype)
    return weight_NK.new_empty(weight_NK.shape[0], dtype=torch.float64 if wide else torch.float32)
