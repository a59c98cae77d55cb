"""DoRA's norms, kept from one optimizer step to the next: over microbatches, recomputation in backward, and evaluation.

A norm depends on W, A, B and the scaling alone. RowNorms keeps those of a model and, at the first get() after a change,
computes those of all modules that changed, in few launches. What counts as a change:

    seen on the host, at every get()      another tensor object, storage, address, shape or version counter of W, A or B, or
                                          another scaling; invalidate(); a step of any torch optimizer (torch's fused
                                          optimizers move no version counter), for trusted handles one that holds A or B
    seen in the data, not trusted only    any write that leaves no trace on the host: through .data, a NumPy view, a kernel.
                                          On a CPU A and B are compared with copies; on a GPU 64-bit sums over their bits are
                                          compared on the device, and kernels compute where they differ: nothing waits

A window (RowNorms.open and close; packlora.accelerate puts them around a model's forward) is a time in which nobody writes to A
or B unseen: the data of all handles are checked together, at its first get(), and not again. Outside of windows every get()
checks those of its own handle. A CUDA graph that is captured contains the check and the computation, of the window or of the
handle: what is kept has no part in it.

A trusted handle is for owners who change A and B only by torch's optimizers and in-place operations; it costs the host under
3 us a get(). Of W, which is frozen, the data check looks at 8 elements of every row: it sees a merge, an unmerge, another
quantisation, a row set to zero. A write through .data to a few other elements of W it does not see: then call invalidate().

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
from packlora.ops.row_norm.row_norm import NormProblem, RowChunks, row_norms, squared_row_norm, takes_kernels

_NUMBERS = itertools.count()
_LIVE: weakref.WeakSet[RowNorms] = weakref.WeakSet()
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for norms in tuple(_LIVE):
        norms._stepped(optimizer)


register_optimizer_step_post_hook(_after_step)


class NormHandle:
    """One module's norm. Made by RowNorms.add; belongs to the layer and dies with it."""

    def __init__(
        self, norms: RowNorms, weight: torch.Tensor | RowChunks, A: torch.Tensor, B: torch.Tensor, scaling: float,
        trusted: bool,
    ) -> None:  # fmt: skip
        self.norms, self.weight, self.A, self.B, self.scaling, self.trusted = norms, weight, A, B, scaling, trusted
        self._register()

    def _register(self) -> None:
        self.number = next(_NUMBERS)
        self._epoch = self._steps = 0
        self._asked = self.norms._window
        """The last window in which get() was called, or when it was made."""
        self._kept: _Kept | None = None
        self._base: tuple[Any, tuple[StorageWeakRef, ...], torch.Tensor] | None = None
        self._watched: _Watched | None = None
        self.norms._handles[self.number] = self

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("norms", "weight", "A", "B", "scaling", "trusted")}

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

        While a CUDA graph is being captured, the check of the data and the computation become part of the graph, whether
        the handle is trusted or not.

        Raises:
            RuntimeError: an operand is not whole here (sharded, or its storage is freed).
        """
        return self.norms._get(self)

    def invalidate(self) -> None:
        """The next get() computes, also ||W||^2."""
        self._epoch += 1

    def _key(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """All that the host can see of the operands: what they are, with W's version; and what tells of writes to A and B.
        `_kept` and `_base` hold weak references to the storages, so no other storage can have their address."""
        A, B = self.A, self.B
        return (float(self.scaling), _place(A), _place(B), self._frozen_key()), (self._steps, _version(A), _version(B))

    def _frozen_key(self) -> tuple[Any, ...]:
        if isinstance(self.weight, torch.Tensor):
            return (self._epoch, _place(self.weight), _version(self.weight))
        return (self._epoch, *((_place(source), _version(source)) for source in self._sources()))

    def _sources(self) -> tuple[torch.Tensor, ...]:
        return self.weight.tensors if isinstance(self.weight, RowChunks) else (self.weight,)

    def _base_N(self) -> torch.Tensor:
        key = self._frozen_key()
        if self._base is None or self._base[0] != key:
            refs = tuple(StorageWeakRef(source.untyped_storage()) for source in self._sources())
            self._base = (key, refs, squared_row_norm(self.weight))
        return self._base[2]

    def _problem(self) -> NormProblem:
        problem = NormProblem(self.weight, self.A, self.B, self.scaling)
        if takes_kernels(problem) or isinstance(self.weight, RowChunks):
            return NormProblem(self.weight, self.A, self.B, self.scaling, self._base_N())
        return problem

    def _missing(self) -> str | None:
        """Which operand is not whole here."""
        named = [("A", self.A), ("B", self.B), *(("weight", source) for source in self._sources())]
        for name, operand in named[: 2 if isinstance(self.weight, RowChunks) else 3]:
            if type(operand) not in _PLAIN:
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
        self._together: dict[tuple[torch.device, int], _Watched] = {}
        self._captured: list[_Watched] = []
        self._in_window: dict[int, torch.Tensor] = {}
        """By handle, what this window's check gave while a graph was being captured."""
        self._batches: tuple[list[Any], list[_Watched]] | None = None
        """What the last check of a window was of, and by which batches, where batches on a device did all of it."""
        _LIVE.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def add(
        self, weight: torch.Tensor | RowChunks, A: torch.Tensor, B: torch.Tensor, scaling: float, trusted: bool = False
    ) -> NormHandle:
        """weight [N, K], A [r, K], B [N, r]; see the module's docstring for what `trusted` promises."""
        return NormHandle(self, weight, A, B, scaling, trusted)

    def invalidate(self) -> None:
        for handle in list(self._handles.values()):
            handle.invalidate()

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

    def prepare_graphs(self) -> None:
        """Make the tables that get() needs in CUDA graphs captured from now on; without them a graph computes norms without
        kernels. They serve as long as operands stay where they are."""
        for handle in self._handles.values():
            if handle._missing() is None and _watchable(handle):
                handle._watched = _Watched([handle])

    def _check_all(self, since: int) -> None:
        """Check the data of handles that are in use: get() was called since the window with this number."""
        handles = [handle for handle in self._handles.values() if not handle.trusted and handle._asked >= since]
        keys = {handle.number: handle._key() for handle in handles}
        places = [(number, key[0]) for number, key in keys.items()]
        capturing = _capturing()
        if self._batches is not None and self._batches[0] == places:  # nothing moved: straight to the device
            for own in self._batches[1]:
                if capturing:
                    self._captured.append(own)  # the graph has its addresses
                    self._in_window.update(zip(own.numbers, own.norms(), strict=True))
                else:
                    own.window = self._window
                    self._keep([self._handles[number] for number in own.numbers], own.norms(), keys)
            return
        if capturing:  # new tables cannot be captured
            return
        whole = [handle for handle in handles if handle._missing() is None]
        self._batches = None
        self._update(whole)
        if whole and len(whole) == len(handles) and all(map(_watchable, whole)):
            used = [own for own in self._together.values() if own.window == self._window]
            if sum(len(own.numbers) for own in used) == len(whole):
                self._batches = (places, used)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for handle in list(self._handles.values()):
            if not handle.trusted or id(handle.A) in held or id(handle.B) in held:
                handle._steps += 1

    def _get(self, handle: NormHandle) -> torch.Tensor:
        handle._asked = self._window
        if self._open and self._checked != self._window:
            since, self._checked = self._checked, self._window
            self._check_all(since)
        if _capturing():
            return self._in_graph(handle)
        kept = handle._kept
        if kept is None or kept.key != handle._key():
            if missing := handle._missing():
                raise RuntimeError(f"the norm of W + s B A needs its operands whole: {missing}")
            self._update([h for h in self._handles.values() if h is handle or self._like(h, handle)])
        elif not (handle.trusted or self._checked_now(kept)):
            self._update([handle])
        assert handle._kept is not None
        return handle._kept.norm_on_this_stream()

    def _checked_now(self, kept: _Kept) -> bool:
        return self._open and kept.window == self._window

    def _like(self, other: NormHandle, handle: NormHandle) -> bool:
        """Whether another handle is brought up to date with this one."""
        if other.trusted != handle.trusted or other.A.device != handle.A.device or other._missing() is not None:
            return False
        if other._kept is None or other._kept.key != other._key():
            return True
        return _watchable(other) and not self._checked_now(other._kept)

    def _update(self, handles: Sequence[NormHandle]) -> None:
        """Bring the handles up to date, in one batch for each device and kind of operands."""
        watched: dict[torch.device, list[NormHandle]] = {}
        stale: dict[torch.device, list[NormHandle]] = {}
        for handle in handles:
            kept = handle._kept
            if not handle.trusted and _watchable(handle):
                watched.setdefault(handle.A.device, []).append(handle)
            elif kept is not None and kept.key == handle._key() and kept.is_of(handle):
                kept.window = self._window
            else:
                stale.setdefault(handle.A.device, []).append(handle)
        for members in stale.values():
            self._keep(members, row_norms([handle._problem() for handle in members]))
        for device, members in watched.items():
            self._watch(device, members)

    def _watch(self, device: torch.device, handles: list[NormHandle]) -> None:
        if len(handles) == 1:
            (handle,) = handles
            if handle._watched is None or not handle._watched.serves(handles):
                handle._watched = _Watched(handles)
            self._keep(handles, handle._watched.norms())
            return
        from packlora.ops.row_norm.batch import batches

        for place, indices in enumerate(batches([handle._problem() for handle in handles])):
            members = [handles[index] for index in indices]
            own = self._together.get((device, place))
            if own is None or not own.serves(members):
                own = self._together[device, place] = _Watched(members)
            own.window = self._window
            self._keep(members, own.norms())

    def _keep(
        self, handles: Sequence[NormHandle], norms: Sequence[torch.Tensor], keys: Mapping[int, Any] | None = None
    ) -> None:
        """Of handles on one device; keys: by number, where they are known."""
        event = None
        if norms[0].is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(norms[0].device))
        stream, window = _stream(norms[0]), self._window
        for handle, norm_N in zip(handles, norms, strict=True):
            key, kept = handle._key() if keys is None else keys[handle.number], handle._kept
            if kept is not None and kept.copies is None and kept.key[0] == key[0]:  # the references serve on
                kept.key, kept.norm_N, kept.window, kept.stream, kept.event = key, norm_N, window, stream, event
            else:
                handle._kept = _Kept.of(handle, norm_N, key, window, stream, event)

    def _in_graph(self, handle: NormHandle) -> torch.Tensor:
        """Part of the graph: nothing of it is kept, since a replay changes it behind the host's back. Where tables for the
        check were not made before the capture, the graph computes the norm at each replay, without kernels."""
        if (norm_N := self._in_window.get(handle.number)) is not None:
            return norm_N
        watched, base = handle._watched, handle._base
        # a ||W||^2 that is not up to date would be computed in the graph, and be kept
        if watched is not None and base is not None and base[0] == handle._frozen_key() and watched.serves([handle]):
            if not any(own is watched for own in self._captured):
                self._captured.append(watched)  # the graph has its addresses
            return watched.norms()[0]
        return row_norms([NormProblem(handle.weight, handle.A, handle.B, handle.scaling)], kernels=False)[0]


@dataclass(slots=True)
class _Kept:
    """A norm, and what it was computed from."""

    norm_N: torch.Tensor
    key: tuple[Any, ...]
    refs: tuple[StorageWeakRef, ...]
    window: int
    copies: tuple[torch.Tensor, ...] | None
    stream: int
    event: Any

    @classmethod
    def of(
        cls, handle: NormHandle, norm_N: torch.Tensor, key: tuple[Any, ...], window: int, stream: int, event: Any
    ) -> _Kept:
        operands = (handle.A, handle.B, *handle._sources())
        refs = tuple(StorageWeakRef(operand.untyped_storage()) for operand in operands)
        copies = None
        if not (handle.trusted or handle.A.is_cuda or _watchable(handle)):
            copies = tuple(tensor.clone() for tensor in _data(handle))
        return cls(norm_N, key, refs, window, copies, stream, event)

    def is_of(self, handle: NormHandle) -> bool:
        """Whether the data are those that it was computed from, as far as the host can say without waiting for a device."""
        if handle.trusted:
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


class _Watched:
    """Modules whose data are checked and whose norms are computed on the device, together, in one batch.

    It stands for one state of the frozen weights as the host sees it: after a change of theirs base_N is another tensor, at
    another address (the old one is held here), and the modules get another _Watched, which has seen nothing yet.
    """

    def __init__(self, handles: Sequence[NormHandle]) -> None:
        from packlora.ops.row_norm.batch import addresses, batch_of

        problems = [handle._problem() for handle in handles]
        self.addresses = addresses(problems)
        self.batch = batch_of(problems)
        device = handles[0].A.device
        self.seen = torch.zeros(len(handles), 5, dtype=torch.int64, device=device)
        self.kept = torch.empty(sum(self.batch.sizes), dtype=torch.float32, device=device)
        self.numbers = [handle.number for handle in handles]
        self.window = 0
        self.bases = [handle._base_N() for handle in handles]
        self.refs = [
            StorageWeakRef(operand.untyped_storage()) for h in handles for operand in (h.A, h.B, *h._sources())
        ]

    def serves(self, handles: Sequence[NormHandle]) -> bool:
        from packlora.ops.row_norm.batch import addresses

        return [handle.number for handle in handles] == self.numbers and addresses(
            [handle._problem() for handle in handles]
        ) == self.addresses

    def norms(self) -> list[torch.Tensor]:
        """Of all of them, computed where the data changed; of the host's view, only addresses matter here."""
        with torch.inference_mode(False):  # they are saved for backwards
            return self.batch.split(self.batch.run(self.batch.stale(self.seen), self.kept))


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    if type(tensor) not in _PLAIN:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.untyped_storage()._cdata, tensor.dtype, tensor.shape, tensor.stride()


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _data(handle: NormHandle) -> tuple[torch.Tensor, ...]:
    """What is compared on a CPU: A, B and 8 elements of each row of W."""
    weight = handle.weight
    if isinstance(weight, RowChunks):
        return handle.A.detach(), handle.B.detach()
    N, K = weight.shape
    starts = torch.arange(N).mul_(40503).remainder_(max(K // 8, 1)).mul_(8)
    cols = (starts[:, None] + torch.arange(min(8, K))).to(weight.device)
    return handle.A.detach(), handle.B.detach(), weight.detach().gather(1, cols)


def _watchable(handle: NormHandle) -> bool:
    return (
        isinstance(handle.weight, torch.Tensor)
        and takes_kernels(NormProblem(handle.weight, handle.A, handle.B, handle.scaling))
        and handle.A.is_contiguous() and handle.B.is_contiguous()
    )  # fmt: skip


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
