"""Keys of how a run is spread over devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model, model_validator

from packlora.config.shared import Strict
from packlora.errors import InputError

PLACEMENTS = "packlora.runtime.placements"


@cache
def placements() -> Mapping[str, type[Strict]]:
    """Keys of the placements that have a folder, by its name. The key of that name is the number of processes that make up a
    replica of the model; 1: the placement is not used."""
    found = sorted(module.name for module in iter_modules(import_module(PLACEMENTS).__path__) if module.ispkg)
    return {name: import_module(f"{PLACEMENTS}.{name}").Keys for name in found}


if TYPE_CHECKING:

    class _Keys(Strict):
        """Keys of these placements."""
else:
    _Keys = create_model("_Keys", __base__=tuple(reversed(placements().values())) or Strict)


class ParallelConfig(_Keys):
    """Distribution of a run over the processes that torchrun starts, one for each device. auto: the defaults."""

    devices_per_job: int | Literal["auto"] = Field("auto")
    """Devices that share each job's microbatches and add up its gradient. 1: every job is whole on one device. It divides the
    number of processes, and `tensor` divides it. auto: 1 with a rollout, else as few as leave no device idle for long."""
    timeout_s: float = Field(600, ge=1, le=1e6)
    """Seconds after which a process that does not answer is given up, and the run ends."""
    pipeline: int | Literal["auto"] = Field("auto")
    """Pipeline parallel size: number of stages, each with some of the layers; microbatches of all jobs pass through them. A
    stage is a device, or as many as tensor or expert says. It divides the number of processes. auto: one, and several where a
    device is estimated to hold no whole base model with what training needs, and they are predicted to be faster than
    shard_base."""
    tensor: int = Field(1, ge=1)
    """Tensor parallel size: devices that hold the base model together, each a slice of every layer's weights, and whole
    experts. It divides the number of processes."""
    expert: int = Field(1, ge=1)
    """Expert parallel size: devices that each hold some of the experts of each layer, and everything else of the base model;
    they run the same microbatches. It divides the number of processes and that of the experts. With tensor, tensor * expert
    devices share the experts, and every group of `tensor` devices shares everything else."""
    ep_implementation: Literal["all_reduce", "all_to_all"] = "all_reduce"
    """Communication with expert. all_reduce: the devices run the same microbatches, and the outputs of their experts are added
    up. all_to_all: each device has microbatches of its own, whose tokens are sent to the experts and back."""
    sequence_parallel: bool = False
    """Sequence parallelism with tensor: the devices also share the tokens of norms and residuals, between the layers that are
    cut."""
    shard_base: bool | int | Literal["auto"] = "auto"
    """Hold a part of the rows of every weight on each device, and gather a layer when it is computed. true: all devices share
    the base model so, and every job; with tensor or expert, what each of these has. A number: so many do, times tensor or
    expert, and there are several such sets. auto: where a device is estimated to hold no whole one with what training needs."""
    offload_base: bool = False
    """Keep each device's part of the layers in the memory of its host, with shard_base, and copy it to the device whenever a
    layer is gathered. It changes no number, takes time, and brings nothing on a CPU."""

    @model_validator(mode="after")
    def _known(self) -> ParallelConfig:
        if self.devices_per_job != "auto" and self.devices_per_job < 1:
            raise ValueError(f"devices_per_job is {self.devices_per_job}; give auto or a number of devices, at least 1")
        if self.pipeline != "auto" and self.pipeline < 1:
            raise ValueError(f"pipeline is {self.pipeline}; give auto or a number of stages, at least 1")
        if self.has_degree and int(self.shard_base) < 2:
            raise ValueError(
                f"shard_base is {self.shard_base}; give true, false, auto or a number of devices, at least 2"
            )
        if self.stages > 1 and self.is_sharded:
            raise ValueError(
                f"pipeline is {self.pipeline} and shard_base is {str(self.shard_base).lower()}, two ways to share the weights: "
                "a stage would gather each of its layers again for every microbatch, and has them in memory as it is; give one"
            )
        if self.exchanges and self.stages > 1:
            raise ValueError(
                f"pipeline is {self.pipeline} and ep_implementation is all_to_all, by which devices exchange tokens in every "
                "layer at the same time, but pipelines run without waiting for one another; leave ep_implementation out"
            )
        if self.ep_implementation == "all_to_all" and self.expert == 1:
            raise ValueError(
                "ep_implementation is all_to_all, which goes with expert, the devices that share them; set both"
            )
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel goes with tensor, the devices that share the tokens; set both")
        if self.offload_base and not self.is_sharded:
            raise ValueError(
                f"offload_base is true and shard_base is {str(self.shard_base).lower()}, but what is kept on the host are the "
                "parts of layers that devices gather from each other; set shard_base to true or a number too"
            )
        own, size = self.own
        if size > 1 and (
            others := [*(name for name in placements() if name != own and getattr(self, name) > 1), *self.ways]
        ):
            raise ValueError(f"{own} is {size} and {others[0]} is set too, two placements of a replica; give one")
        parts = {"pipeline": self.stages, "tensor": self.tensor, "expert": self.expert, "shard_base": self.degree or 1}
        parts |= {own: size} if size > 1 else {}
        together, named = math.prod(parts.values()), " times ".join(key for key, size in parts.items() if size > 1)
        if self.devices_per_job != "auto" and self.devices_per_job % together:
            raise ValueError(
                f"devices_per_job is {self.devices_per_job}, but {together} devices hold the base model together ({named}); "
                f"give a multiple of {together}"
            )
        return self

    @property
    def stages(self) -> int:
        """Stages of the pipeline that is requested; 1 under auto."""
        return 1 if self.pipeline == "auto" else self.pipeline

    @property
    def own(self) -> tuple[str, int]:
        """Name of the folder whose placement is requested, and its number of processes; "" and 1 without one."""
        return next(((name, size) for name in placements() if (size := getattr(self, name)) > 1), ("", 1))

    @property
    def package(self) -> str | None:
        """Package of the placement that is requested; see Layout.package."""
        name, _ = self.own
        return f"{PLACEMENTS}.{name}" if name else "packlora.pipeline" if self.stages > 1 else None

    @property
    def exchanges(self) -> bool:
        """Whether tokens go to experts on other devices and back."""
        return self.ep_implementation == "all_to_all"

    @property
    def ways(self) -> list[str]:
        """Keys by which several devices hold the base model together."""
        asked = {
            "tensor": self.tensor > 1, "pipeline": self.stages > 1, "shard_base": self.is_sharded, "expert": self.expert > 1,
        }  # fmt: skip
        return [key for key, is_asked in asked.items() if is_asked]

    @property
    def experts_on(self) -> int:
        """Number of devices that compute the experts of a microbatch together."""
        return 1 if self.exchanges else self.expert

    @property
    def in_parts(self) -> str | None:
        """Key by which several devices hold the base model together and run the same microbatches, or stages of them; None
        without such a key."""
        return next((key for key in self.ways if key != "shard_base"), None)

    @property
    def divided(self) -> str | None:
        """Key by which no device holds a whole base model: shard_base, or see `in_parts`; None without such a key."""
        return "shard_base" if self.is_sharded else self.in_parts

    @property
    def is_sharded(self) -> bool:
        """Whether weights are to be sharded by rows."""
        return self.shard_base is True or self.has_degree

    @property
    def has_degree(self) -> bool:
        """Whether shard_base is a number."""
        return isinstance(self.shard_base, int) and not isinstance(self.shard_base, bool)

    @property
    def degree(self) -> int | None:
        """The number of shard_base; None where it has none."""
        return int(self.shard_base) if self.has_degree else None

    def degrees(self, processes: int) -> dict[str, Any]:
        """Numbers of devices, out of so many, that the keys ask for, by the fields of a layout (parallel/layout.py)."""
        shard = self.degree or (processes // (self.tensor * self.expert) if self.shard_base is True else 1)
        own = {"tensor": self.tensor, "pipeline": self.stages, "expert": self.expert, "exchange": self.exchanges}
        return {"shard": shard, **own, "own": self.own}

    def check(self, processes: int) -> None:
        """Raises InputError where so many processes cannot be divided as asked."""
        each = self.devices_per_job
        started = f"{processes} {'process was' if processes == 1 else 'processes were'} started, one for each device"
        parts = {"pipeline": self.stages, "shard_base": self.degree or 1, "tensor": self.tensor, "expert": self.expert}
        parts |= {name: size for name, size in (self.own,) if name}
        for name, together in parts.items():
            if processes % together:
                raise InputError(
                    f"parallel.{name} is {together}, but {started}; start a multiple of {together}, or give a number that "
                    f"divides {processes}"
                )
        product, slices = math.prod(parts.values()), self.tensor * self.expert
        if processes % product:
            named = " and ".join(f"parallel.{key} {size}" for key, size in parts.items() if size > 1)
            raise InputError(f"{named.replace(' ', ' is ', 1)}, but {started}; start a multiple of {product}")
        key = " times parallel.".join(name for name in ("tensor", "expert") if parts[name] > 1)
        if self.shard_base is True and processes == 1:
            raise InputError("parallel.shard_base shares the base model over processes, but one process was started")
        if self.shard_base is True and processes == slices:
            raise InputError(
                f"parallel.shard_base shares what each of {slices} devices (parallel.{key}) holds with further ones, but "
                f"{started}; start a multiple of {slices}, at least {2 * slices}, or leave one of them out"
            )
        if self.shard_base is True and each not in ("auto", processes):
            raise InputError(
                f"parallel.devices_per_job is {each}, but with shard_base all {processes} processes share every job; leave it "
                "out"
            )
        if each != "auto" and processes % each:
            raise InputError(
                f"parallel.devices_per_job is {each}, but {started}; give a number that divides {processes}"
            )
