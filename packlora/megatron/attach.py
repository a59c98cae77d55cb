"""apply_lora: put adapters onto a Megatron-Core model, in place.

Parameters are registered on the layers that they belong to, as lora_A_<adapter>, lora_B_<adapter> and lora_magnitude_<adapter>,
with _<expert> behind them on grouped experts. They are marked as Megatron-Core marks its own, so its DistributedDataParallel,
finalize_model_grads and optimizers treat them rightly:

    allreduce                            False for experts under expert parallelism: reduced over their own data parallel group
    tensor_model_parallel, partition_dim of slices, and of experts: counted on every process in the norm of the gradient
    average_gradients_across_tp_domain   of what every process has whole and computes a part of the gradient of. The mean is
                                         taken once a step over all of them; here gradients are multiplied by the number of
                                         processes before, so it is the sum

A of a column-parallel layer, B and magnitude of a row-parallel layer are such parts, with sequence parallelism and without.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from packlora.adapters.linear import AdaptedLinear, adapted_linear
from packlora.adapters.sharded import Shard
from packlora.adapters.spec import AdapterSpec
from packlora.adapters.weights import AdapterWeights, parameter_shapes
from packlora.errors import InputError
from packlora.megatron.experts import Dispatch
from packlora.megatron.experts import check as check_experts
from packlora.megatron.forward import EmbeddingForward, LinearForward, RouterForward
from packlora.megatron.layers import Found, View, bias_of, layers_of
from packlora.megatron.owners import Owned
from packlora.ops.dropout.keys import layer_salt
from packlora.plans.select import PlanChooser
from packlora.seeding import stable_hash

NAME = re.compile(r"\w+")


class Placed:
    """The adapters of a model, before they have a face: layers, weights, who owns tokens. See adapters.py."""

    def __init__(self, chunks: list[torch.nn.Module], specs: Mapping[str, AdapterSpec], seed: int) -> None:
        self.chunks = chunks
        self.layers = layers_of(chunks)
        weight = next(iter(self.layers.values())).tensor()
        self.chooser = PlanChooser(weight.device)
        self.owned = Owned(self.chooser, list(specs))
        self.owned.drops = any(one.dropout for spec in specs.values() for one in spec.modules.values())
        self.specs = dict(specs)
        self.linears: dict[str, AdaptedLinear] = {}
        self.weights: dict[str, dict[str, AdapterWeights]] = {name: {} for name in specs}
        for chunk in chunks:
            chunk.requires_grad_(False)
        for number, (name, spec) in enumerate(specs.items()):
            for path in spec.modules:
                self._add(name, number, path, seed)
        self._write_magnitudes()
        self._forwards()

    def _add(self, name: str, number: int, path: str, seed: int) -> None:
        layer, module = self.layers[path], self.specs[name].modules[path]
        linear = self.linears.get(path)
        if linear is None:
            linear = self.linears[path] = adapted_linear(_view(layer), layer_salt(path), self.owned, self.chooser)
        wide = torch.float64 if layer.tensor().dtype == torch.float64 else torch.float32
        shapes = parameter_shapes(module, linear.base)
        room = {key: torch.zeros(shape, dtype=wide, device=layer.tensor().device) for key, shape in shapes.items()}
        own = AdapterWeights(module, linear.base, stable_hash("start", seed, path), room)
        linear.adapters[number] = self.weights[name][path] = own
        for key, parameter in own.named_parameters().items():
            layer.module.register_parameter(parameter_name(layer, name, key), parameter)
            _mark(parameter, key, layer)

    def _write_magnitudes(self) -> None:
        made = [
            first
            for path, linear in self.linears.items()
            for own in linear.adapters.values()
            for first in own.first_values(linear.frozen, None, self.owned)
        ]
        with torch.no_grad():
            for parameter, value in made:
                parameter.copy_(value)

    def _forwards(self) -> None:
        """Put the forwards in their places."""
        modules: dict[int, list[tuple[Found, AdaptedLinear]]] = {}
        for path, layer in self.layers.items():
            if path in self.linears:
                modules.setdefault(id(layer.module), []).append((layer, self.linears[path]))
        for members in modules.values():
            layer, linear = members[0]
            module: Any = layer.module
            if layer.kind == "router":
                module.gating = RouterForward(layer, linear, self.owned)
            elif layer.kind == "embedding":
                module.forward = EmbeddingForward(layer, linear.adapters, self.owned)
            else:
                made = LinearForward(members, self.owned)
                module.forward = made.grouped if layer.grouped else made
        for chunk in self.chunks:
            self._watch(chunk)

    def _watch(self, chunk: torch.nn.Module) -> None:
        """Hook a chunk of the model: token owners travel with the tokens, and norms are computed where all processes are at the
        same place."""
        adapted = {id(self.layers[path].module) for path in self.linears}
        for module in chunk.modules():
            dispatcher, experts = getattr(module, "token_dispatcher", None), getattr(module, "experts", None)
            if dispatcher is not None and experts is not None and any(id(one) in adapted for one in experts.modules()):
                check_experts(module, len(self.specs))
                if type(dispatcher).__name__ in ("MoEAllGatherTokenDispatcher", "MoEAlltoAllTokenDispatcher"):
                    Dispatch(module, self.owned)
            config: Any = getattr(module, "config", None)
            if type(module).__name__ == "LanguageModelEmbedding" and config.recompute_granularity is not None:
                module.register_forward_hook(_with_gradient)
        chunk.register_forward_pre_hook(self._begin)
        if getattr(getattr(chunk, "config", None), "recompute_granularity", None) is not None:
            chunk.register_forward_hook(self._end)

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        self.owned.training = module.training
        device = next(iter(self.layers.values())).tensor().device
        if device != self.chooser.device:
            raise InputError(
                f"the model was moved from {self.chooser.device} to {device} after the adapters were put on; move it before "
                "apply_lora"
            )
        if self.owned.merged:
            return
        doras = [own for one in self.linears.values() for own in one.adapters.values() if own.magnitude is not None]
        if doras:
            _check_gathered(self.layers.values())
        for own in doras:
            own.norm()  # the first one that is stale computes all that are

    def _end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            self.owned.remember(output)


def _with_gradient(module: torch.nn.Module, args: Any, output: Any) -> None:
    """Megatron-Core's checkpoints give no gradients where their inputs have none, as those of a frozen embedding."""
    if torch.is_grad_enabled() and isinstance(output, torch.Tensor) and not output.requires_grad:
        output.requires_grad_()


def _check_gathered(layers: Iterable[Found]) -> None:
    """DoRA's norms are made before the first layer, so parameters must be there by then."""
    for layer in layers:
        for hook in layer.module._forward_pre_hooks.values():
            if "DistributedDataParallel" in getattr(hook, "__qualname__", ""):
                raise InputError("DoRA needs its parameters whole before a forward; use overlap_param_gather=False")


def parameter_name(layer: Found, adapter: str, key: str) -> str:
    """The attribute of a layer that holds one of an adapter's parameters."""
    return f"lora_{key}_{adapter}" + (f"_{layer.expert}" if layer.grouped else "")


def _view(layer: Found) -> View:
    weight = layer.tensor()
    if weight is None:
        raise InputError(f"{layer.name} has no weight of its own; untie it from the embedding, or leave it out")
    if layer.kind == "embedding":
        return View(weight.t(), None, cut_of(layer))
    bias, skipped = bias_of(layer) if layer.kind == "linear" else (getattr(layer.module, "bias", None), False)
    return View(weight, bias if layer.dim != 1 and not skipped else None, layer.shard)


def cut_of(layer: Found) -> Shard | None:
    """Slice of an adapter's tensors on a layer that this process has; None: all. The inputs of an embedding are the words."""
    if layer.kind != "embedding":
        return layer.shard
    return None if layer.degree == 1 else Shard(1, layer.rank, layer.degree, 1, None, None, lambda tensor: None)


def _mark(parameter: torch.nn.Parameter, key: str, layer: Found) -> None:
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    config: Any = getattr(layer.module, "config", None)
    experts = layer.expert is not None and getattr(config, "expert_model_parallel_size", 1) > 1
    parameter.allreduce = not experts  # type: ignore[attr-defined]
    shard = cut_of(layer)
    if shard is not None and shard.is_slice(key):
        set_tensor_model_parallel_attributes(parameter, True, shard._dim(key), 1)
        return
    if experts and layer.degree == 1:  # every process of a tensor parallel group has other experts
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return
    part = shard.is_part(key) if shard is not None else layer.sequence and layer.expert is None
    if part:
        parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
        parameter.register_hook(_Times(layer.degree))


class _Times:
    """Hook that multiplies a gradient by the number of processes, because Megatron-Core takes the mean."""

    def __init__(self, degree: int) -> None:
        self.degree = degree

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else gradient * self.degree  # None: the adapter had no tokens


def check_model(chunks: list[torch.nn.Module], names: list[str]) -> dict[str, Found]:
    """The layers of a model that can be given adapters. Raises InputError where it cannot."""
    if not names:
        raise InputError("no adapter is given")
    for name in names:
        if not NAME.fullmatch(name):
            raise InputError(f"adapter {name!r}: a name is letters, digits and underscores, as that of a parameter")
    for chunk in chunks:
        if hasattr(chunk, "ddp_config"):
            raise InputError("the model is wrapped for data parallelism, which must come after the adapters")
        _check_config(chunk)
        if any(".lora_A_" in f".{key}" for key, _ in chunk.named_parameters()):
            raise InputError("the model has adapters; give all of them at once")
    layers = layers_of(chunks)
    if not layers:
        raise InputError("the model has no layers of Megatron-Core or Transformer Engine that can be adapted")
    devices = {str(layer.tensor().device): path for path, layer in layers.items() if layer.tensor() is not None}
    if len(devices) > 1:
        found = ", ".join(f"{path} on {device}" for device, path in devices.items())
        raise InputError(f"layers of the model are on several devices ({found}); move it before apply_lora")
    return layers


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Model without a Float16Module around it; the names and states of a Float16Module's layers are those of the model
    inside."""
    while type(model).__name__ == "Float16Module":
        model = model.module  # type: ignore[assignment]
    return model


ELSEWHERE = {"TEFusedMLP": "use_transformer_engine_op_fuser=False", "GroupedMLP": "moe_use_legacy_grouped_gemm=False"}
"""Modules that read weights without calling the layers that hold them, or that hold the weights of all experts in one tensor,
with the setting that avoids each."""


def _check_config(chunk: torch.nn.Module) -> None:
    """Raises InputError where layers would be computed without their adapters."""
    for path, module in chunk.named_modules():
        for base in type(module).__mro__:
            if base.__name__ in ELSEWHERE:
                raise InputError(
                    f"{path} is a {base.__name__}, whose products adapters cannot take part in; use {ELSEWHERE[base.__name__]}"
                )
    config: Any = getattr(chunk, "config", None)
    wanted = {
        "cuda_graph_impl": ("none", None), "enable_cuda_graph": (False, None), "external_cuda_graph": (False, None),
        "delay_wgrad_compute": (False, None), "overlap_moe_expert_parallel_comm": (False, None),
    }  # fmt: skip
    for key, accepted in wanted.items():
        if getattr(config, key, None) not in accepted:
            raise InputError(
                f"the model's config has {key} = {getattr(config, key)!r}, which adapters do not support; use {accepted[0]!r}"
            )
