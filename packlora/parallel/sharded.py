"""A frozen base model of which each rank holds a part of every weight: `parallel: {shard_base: true}`, or a number of ranks.

The weights are sharded by rows over the ranks (FSDP2, torch.distributed.fsdp.fully_shard), in a group for each layer of the
decoder and one for all else. A layer's weights are gathered before its forward and before its backward, and freed after each.
Adapters are no part of it: each rank has all of them, whole. A rank reads from the files what it holds, and no process ever
holds the model.

All ranks gather the same layers in the same order, or they wait for one another for ever. What a run must do for that:

    the same number of forwards and backwards on every rank; a rank that has no microbatch calls `Shards.idle`
    backwards that reach the same layers: `Shards.adapted` sees to it
    no rank goes on by itself after an error in a forward or a backward (out of memory): the run ends
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from packlora.adapters.expert_layout import by_registry
from packlora.adapters.linear import Attached
from packlora.adapters.owners import MIN_ROWS, TokenOwners
from packlora.base.demo_model import base_path
from packlora.base.device import choose_device, settle_dtype
from packlora.base.fingerprint import own_rows
from packlora.base.load import model_of, read_config
from packlora.base.model import Base, ready_base
from packlora.base.packing import DECODER, decoder_of, hidden_states
from packlora.base.shape import check_row, decoder_layers
from packlora.base.weight_files import WeightFiles, keys_of
from packlora.config import Run
from packlora.errors import InputError
from packlora.form import form_in
from packlora.ops.lora_linear.frozen import Dense, FrozenLinear, FrozenWeight
from packlora.ops.stamp import version
from packlora.parallel.gathers import gather_by_copies


def load_sharded(
    run: Run, tokenizer: Any, longest: Mapping[str, int] | None = None, group: dist.ProcessGroup | None = None,
    weights: WeightFiles | None = None,
) -> Base:  # fmt: skip
    """Load the base model for packed training, a part of each weight on each rank. All ranks call it, with equal arguments.

    What load_base checks is checked here too, on the sharded model, by all ranks in step.

    Args:
        longest: see load_base.
        group: the ranks that share the model; None: all.
        weights: of the base model; None: its files.

    Raises:
        InputError: see load_base; or the weights cannot be read in parts, or a parameter not be sharded. On every rank.
    """
    settle_dtype(run)
    path, device = base_path(run.base_model), choose_device(run.device)
    files = weights or WeightFiles(path, run.revision)
    model = empty_model(path, run.revision, getattr(torch, run.dtype), run.trust_remote_code)
    check_row(model, run.max_tokens_per_microbatch, path)
    keys = keys_of(model, files)
    if (form := form_in(run, model.config, path)) is not None:
        form.share(model, getattr(torch, run.dtype))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),)) if group is None else mesh_of(group, device)
    shards = Shards(model, mesh, files, keys, offload=run.parallel.offload_base)
    base = ready_base(run, model, tokenizer, device, path, longest or {}, shards)
    base.form = form
    return base


def empty_model(
    path: str, revision: str | None, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model of a folder or a hub id with parameters on the meta device, in the dtypes that loading it would give them, and
    with the buffers that it makes itself. Raises InputError."""
    config = read_config(path, revision, trust_remote_code)
    with init_empty_weights(include_buffers=False):
        model = model_of(config, path, trust_remote_code, dtype)
    model.tie_weights()
    if dtype == torch.float64 and any(map(by_registry, model.modules())):
        model.set_experts_implementation("eager")  # torch's grouped products, which are the default, are not for it
    kept_wide = model._get_dtype_plan(dtype)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        for pattern, wide in kept_wide.items():
            if tensor.is_floating_point() and re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(wide)
    return model.requires_grad_(False).eval()


class Gathered(Dense):
    """A weight whose data are there only while its layer runs, at another address every time. It is one tensor object all the
    time, and what fills it again moves no version counter."""

    __slots__ = ()
    stays = False

    @property
    def key(self) -> Hashable:
        counted = version(self.weight)
        return None if counted is None else (id(self.weight), counted)


class Shards:
    """The Storage of a model that is sharded over the ranks of a mesh.

    Args:
        model: its parameters on the meta device; gets those of this rank, in place.
        mesh: of one dimension, with the device that the model computes on.
        files, keys: where its parameters and persistent buffers are read (weight_files.keys_of).
        part: of what the files hold of a parameter, by its name, the rows and columns that are the model's, nothing where it is
            all of it: of a model that is cut (tensor.py), whose slices are then shared by rows.
        offload: keep the layers' rows in the memory of the host. All else stays on the device, where it is whole most of the
            time anyway.

    Raises:
        InputError: a parameter cannot be shared, or the model has no weights beside its layers to tell its device by.
    """

    is_whole, can_record = False, False

    def __init__(
        self, model: PreTrainedModel, mesh: DeviceMesh, files: WeightFiles, keys: Mapping[str, str],
        part: Callable[[str], tuple[slice, ...]] = lambda name: (), offload: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.mesh, self._part = model, mesh, part
        cuda = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        _check_shapes(model, files.path)
        untie(model, mesh, files, keys)
        self.layers = {
            path: layer for path, layer in decoder_layers(model).items() if next(layer.parameters(), None) is not None
        }  # others are on another stage
        self.offload = offload
        self._codes = _as_floats(model)
        for layer in self.layers.values():
            fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(cuda) if offload else OffloadPolicy())
        # the embedding and the output layer are read at both ends of a microbatch: they stay from one to the other
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        # nobody here writes into what the model gives
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        decoder = decoder_of(model)
        setattr(model, DECODER, lambda **inputs: decoder(**inputs))
        register_fsdp_forward_method(model, DECODER)
        self._fill(files, keys)
        gather_by_copies([model, *self.layers.values()], mesh.get_group(), self.device)
        if offload and model.device.type != self.device.type:
            raise InputError(
                f"base_model {files.path!r}: parallel.offload_base keeps the layers on the host, and the first weight of a "
                f"{model.config.model_type} model is in one; leave it out"
            )

    def _fill(self, files: WeightFiles, keys: Mapping[str, str]) -> None:
        """Read this rank's part of every weight."""

        def made(name: str, empty: Any, key: str) -> torch.nn.Parameter:
            on_host = self.offload and self._holder(name) is not self.model
            device = torch.device("cpu") if on_host else self.device
            filled = made_like(empty, device, self._codes.get(name, empty.dtype))
            filled.to_local().copy_(self._read(files, key, name, own_rows(empty.shape[0], self.mesh)))
            return filled  # type: ignore[no-any-return]

        fill_with(self.model, files, keys, made)

    def _read(self, files: WeightFiles, key: str, name: str, rows: slice) -> torch.Tensor:
        """Read these rows of a parameter."""
        owner, _, leaf = name.rpartition(".")
        layer = self.model.get_submodule(owner)
        if isinstance(layer, FrozenLinear) and leaf == "weight":
            return layer.take(files.read(key).to(self.device))[rows]
        return files.read(key, *rows_of(self._part(name), rows))

    # --- Storage ---------------------------------------------------------------------------------------------------------

    def each(self, paths: Iterable[str]) -> Iterator[str]:
        """See Storage. A layer is gathered once for paths in a row that lie in it. All ranks must ask for the same."""
        held: FSDPModule | None = None
        try:
            for path in paths:
                holder = self._holder(path)
                if holder is not held:
                    if held is not None:
                        held.reshard()
                    holder.unshard()
                    held = holder
                yield path
        finally:
            if held is not None:
                held.reshard()

    def _holder(self, path: str) -> FSDPModule:
        parts = path.split(".")
        found: Any = next(
            (layer for stop in range(len(parts), 0, -1) if (layer := self.layers.get(".".join(parts[:stop])))),
            self.model,
        )
        return found  # type: ignore[no-any-return]

    def frozen(self, weight: torch.Tensor) -> FrozenWeight:
        return Gathered(weight)

    def adapted(self, paths: Iterable[str]) -> None:
        """Let every backward begin at the first layer with an adapter of any job: it gathers layers from there on, whoever owns
        the tokens."""
        inside = [
            number for number, name in enumerate(self.layers) if any(path.startswith(f"{name}.") for path in paths)
        ]
        if inside:
            before = [self.model.get_input_embeddings(), *self.layers.values()][inside[0]]
            before.register_forward_hook(with_gradient)

    def holds(self, path: str) -> bool:
        """See Storage."""
        return True

    # --- a rank without a microbatch -------------------------------------------------------------------------------------

    def idle(self, attached: Attached, backward: bool) -> None:
        """Gather what a microbatch gathers, for the other ranks: a forward, and a backward, of a few tokens of nobody."""
        run_nobody(self.model, self.device, attached, backward)


def fill_by_rows(
    model: PreTrainedModel, group: dist.ProcessGroup, device: torch.device, files: WeightFiles, keys: Mapping[str, str],
    offload: bool = False,
) -> None:  # fmt: skip
    """Let the processes of a group share the rows of a model's weights, from which it gathers a layer when it computes it.

    Args:
        keys, offload: see Shards.
    """
    Shards(model, mesh_of(group, device), files, keys, offload=offload)


@torch.no_grad()
def fill_with(
    model: PreTrainedModel, files: WeightFiles, keys: Mapping[str, str],
    made: Callable[[str, torch.Tensor, str], torch.nn.Parameter],
) -> None:  # fmt: skip
    """Put weights in the places of those on the meta device; tied ones stay tied. Buffers are read as they are.

    Args:
        made: reads a parameter, by its name, as it is on the meta device, and by its key in the files.
    """
    places: dict[int, list[str]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        places.setdefault(id(parameter), []).append(name)
    for names in places.values():
        filled = made(names[0], parameters[names[0]], next(keys[name] for name in names if name in keys))
        for name in names:
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._parameters[leaf] = filled
    for name, buffer in model.named_buffers():
        if name in keys:
            buffer.copy_(files.read(keys[name]))


def _as_floats(model: PreTrainedModel) -> dict[str, torch.dtype]:
    """Give parameters of whole numbers a dtype of floats as long as they are on the meta device; their own dtypes, by name.
    FSDP, up to torch 2.11, shares only what could have a gradient."""
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.is_floating_point():
            found[name], parameter.data = parameter.dtype, torch.empty_like(parameter, dtype=torch.float8_e4m3fn)
    return found


def made_like(empty: DTensor, device: torch.device, dtype: torch.dtype) -> Any:
    """A frozen parameter that is shared as one on the meta device is, with its rows on a device.

    They stay there where the mesh is of another device. DTensor.from_local would take them to that one, and FSDP keeps no
    layers on the host whose rows are not there.
    """
    return torch.nn.Parameter(torch.empty_like(empty, device=device, dtype=dtype), requires_grad=False)


def run_nobody(model: PreTrainedModel, device: torch.device, attached: Attached, backward: bool) -> None:
    """A forward, and a backward, of a few tokens of nobody."""
    ids = torch.arange(MIN_ROWS, device=device)
    with attached.active(TokenOwners(MIN_ROWS, ())), torch.set_grad_enabled(backward):
        hidden = hidden_states(model, ids, ids, (MIN_ROWS,))
        if hidden.requires_grad:
            hidden.backward(torch.zeros_like(hidden))


def mesh_of(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """Mesh of one dimension over the processes of a group."""
    return DeviceMesh.from_group(group, device.type)


def rows_of(part: tuple[slice, ...], rows: slice) -> tuple[slice, ...]:
    """Slices of these rows of a part of a weight, counted from its first one."""
    first = part[0].start or 0 if part else 0
    return (slice(first + rows.start, first + rows.stop), *part[1:])


def _check_shapes(model: PreTrainedModel, path: str) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise InputError(f"base_model {path!r}: several processes share weights by rows, and {name} is one number")


def untie(model: PreTrainedModel, mesh: DeviceMesh, files: WeightFiles, keys: Mapping[str, str]) -> None:
    """Parameters that the model ties stay apart where the files hold both and they differ, as transformers has it."""
    first: dict[int, str] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name not in keys or first.setdefault(id(parameter), name) == name:
            continue
        rows = own_rows(parameter.shape[0], mesh)
        same = torch.equal(files.read(keys[first[id(parameter)]], rows), files.read(keys[name], rows))
        agreed = torch.tensor([int(same)], device=mesh.device_type)
        dist.all_reduce(agreed, dist.ReduceOp.MIN, mesh.get_group())
        if not agreed.item():
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, torch.nn.Parameter(parameter.detach().clone(), False))


def with_gradient(module: torch.nn.Module, args: Any, output: Any) -> None:
    """A hook: what a module gives has a gradient from here on."""
    if torch.is_grad_enabled():
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if not hidden.requires_grad:
            hidden.requires_grad_()
