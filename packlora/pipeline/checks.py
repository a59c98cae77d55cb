"""Whether a model can be cut into stages, found by trial, and what a run on stages may not have. Nothing is loaded before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.adapters.spec import AdapterSpec
from packlora.base.packing import decoder_of
from packlora.base.shape import decoder_layers
from packlora.config import CUT_OPTIMS
from packlora.errors import InputError, plural
from packlora.parallel.meta import run_on_meta
from packlora.runtime.prepared_job import PreparedJob
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.wholeness import refuse

KEY = "parallel.pipeline"


def layer_chain(model: PreTrainedModel) -> tuple[int, torch.dtype, list[bool]]:
    """Width and dtype of the hidden states that the decoder's layers hand from one to the next, and which give them in a tuple.

    Args:
        model: may be without weights.

    Raises:
        InputError: they do something else.
    """
    layers = list(decoder_layers(model).values())
    given: dict[int, Any] = {}
    got: dict[int, Any] = {}

    def before(number: int, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given[number] = args[0] if args else kwargs.get("hidden_states")

    def after(number: int, _: torch.nn.Module, args: Any, output: Any) -> None:
        got[number] = output

    hooks = [layer.register_forward_pre_hook(partial(before, n), with_kwargs=True) for n, layer in enumerate(layers)]
    hooks += [layer.register_forward_hook(partial(after, number)) for number, layer in enumerate(layers)]
    run_on_meta(model, hooks, what_of(model))
    tuples = [isinstance(got.get(number), tuple) for number in range(len(layers))]
    handed: torch.Tensor | None = None
    for number in range(len(layers)):
        x, y = given.get(number), got.get(number)
        y = y[0] if isinstance(y, tuple) else y
        if not _alike(x, y) or (handed is not None and x is not handed):
            raise InputError(
                f"{what_of(model)} cannot be cut into stages: its layers do not hand hidden states [1, tokens, width] from one "
                f"to the next (layer {number})"
            )
        handed = y
    if handed is None or decoder_of(model) is model:
        raise InputError(
            f"{what_of(model)} cannot be cut into stages: it has no list of layers in a decoder of its own"
        )
    return handed.shape[-1], handed.dtype, tuples


def _alike(x: Any, y: Any) -> bool:
    """Whether both are hidden states, of the same shape and dtype."""
    tensors = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    return tensors and x.ndim == 3 and x.shape == y.shape and x.dtype == y.dtype


def ends_of(model: PreTrainedModel) -> dict[str, bool]:
    """Whether a module runs behind the last layer of the decoder, by path, for all that run before the first layer or behind
    the last one and so belong to the first or the last stage. Modules inside of layers are none of them.

    Args:
        model: whole, may be without weights.
    """
    layers = [*decoder_layers(model).values()]
    inside = {id(module) for layer in layers for module in layer.modules()}
    begun, ran = [0], dict[str, set[int]]()

    def note(path: str, *_: Any) -> None:
        ran.setdefault(path, set()).add(begun[0])

    def begin(*_: Any) -> None:
        begun[0] += 1

    hooks = [layer.register_forward_pre_hook(begin) for layer in layers]
    hooks += [
        module.register_forward_pre_hook(partial(note, path))
        for path, module in model.named_modules()
        if id(module) not in inside and not list(module.children())
    ]
    run_on_meta(model, hooks, what_of(model))
    return {path: at == {len(layers)} for path, at in ran.items() if at in ({0}, {len(layers)})}


def check_stages(model: PreTrainedModel, layers: int, adapted: Mapping[str, Sequence[str]]) -> None:
    """Refuse what cannot be trained in stages, before anything is loaded.

    Args:
        model: may be without weights.
        layers: that its configuration says it has.
        adapted: by job the paths of the modules that it trains something on.

    Raises:
        InputError: naming the model or the job and its module.
    """
    layer_chain(model)
    check_layers(model, layers)
    inside, ends = tuple(f"{path}." for path in decoder_layers(model)), ends_of(model)
    for job, paths in adapted.items():
        if found := [path for path in paths if not path.startswith(inside) and path not in ends]:
            raise InputError(
                f"job {job!r}: {found[0]} is neither in a layer of the decoder nor before or behind all of them, and so on no "
                "stage of a pipeline (parallel.pipeline); leave it out"
            )


def check_layers(model: PreTrainedModel, layers: int) -> None:
    found = len(decoder_layers(model))
    if found != layers:
        raise InputError(
            f"{what_of(model)} has {found} layers in its list of layers, and {layers} in its configuration"
        )


def what_of(model: PreTrainedModel) -> str:
    """How messages begin."""
    return f"{KEY}: a {model.config.model_type} model"


# --- a run -------------------------------------------------------------------------------------------------------------


def check(prepared: PreparedRun, skeleton: PreTrainedModel) -> None:
    """Raises InputError where the model cannot be cut into the stages that the run file asks for."""
    stages, layers = prepared.run.parallel.stages, prepared.shape.layers
    for job in prepared.jobs:
        refuse(job, KEY, tied_in_stages(job.spec))
    if stages > layers:
        raise InputError(f"{KEY} is {stages}, but the model has {plural(layers, 'layer')}; give at most {layers}")
    check_stages(skeleton, layers, prepared.adapted)


def check_new(prepared: PreparedRun, items: Sequence[PreparedJob]) -> None:
    """Raises InputError where jobs cannot join a run on the stages of a pipeline."""
    for item in items:
        if found := needs_all_layers(item):
            raise InputError(
                f"job {item.config.name!r}: {found}, but every device has a part of the base model; leave that out"
            )
    if prepared.encoder is not None:
        adapted = {item.config.name: list(item.spec.modules) for item in items}
        check_stages(prepared.encoder.skeleton, prepared.shape.layers, adapted)


def tied_in_stages(spec: AdapterSpec) -> str | None:
    """Part of a job that needs both ends of a base model on one device; None where there is nothing such."""
    tied = next((path for path, own in spec.modules.items() if own.kind == "tied"), None)
    return None if tied is None else f"it trains rows of the embedding, to which {tied} is tied on another stage"


def needs_all_layers(job: PreparedJob) -> str | None:
    """Part of a job that takes all layers of the base model on every device; None where some do."""
    if job.beside_texts:
        return f"its data has {job.beside_texts}"
    if job.config.train.optim not in CUT_OPTIMS:
        return (
            f"its train.optim is {job.config.train.optim}, which steps whole jobs ({', '.join(CUT_OPTIMS)} step parts)"
        )
    return tied_in_stages(job.spec)
