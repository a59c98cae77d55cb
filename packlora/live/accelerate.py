"""packlora.accelerate: any PEFT LoRA or DoRA model, in place, on this package's operator.

    import packlora
    print(packlora.accelerate(model))      # which modules run on it, by which plan, and which do not, and why
    packlora.restore(model)                # everything as before

The model stays PEFT's: same Parameters, same state_dict keys, same files, same results. adapters/peft_live.py owns what
happens in a forward of a linear layer, adapters/peft_dora.py in that of another kind of layer with DoRA; this file puts it in
place, takes it out and reports.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from packlora.adapters import in_place
from packlora.adapters.norms import RowNorms
from packlora.adapters.outputs import KeptOutputs, padded, untouched_outputs
from packlora.adapters.recipes import add_recipes, remove_recipes
from packlora.adapters.siblings import SiblingGroup, sibling_groups
from packlora.live import dora as peft_dora
from packlora.live.dora import DoraForward
from packlora.live.layers import (
    Calls,
    LayerCall,
    LayerForward,
    OwnForward,
    Warned,
    choose_plan,
    compute,
)
from packlora.ops.gpu import why_no_kernels
from packlora.ops.lora_linear.plan import CHAIN, Plan, Situation, legal

NOMINAL_TOKENS = 4096
"""For which the report names the plan."""
WATCHED = 40
"""Tokens of the longer run that watches outputs."""


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """One adapted module: its path in the model, and its kind. reason says why it is left to PEFT, as things stand; plan (its
    name) and group (its siblings' paths) are of those that are not."""

    path: str
    kind: str
    plan: str | None = None
    group: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def accelerated(self) -> bool:
        """Whether packlora's operator computes it."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class ModuleCalls:
    """What became of the calls of one module: how many were computed by this package, and how many by PEFT, by reason."""

    served: int
    left: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Report:
    """What accelerate() found, when it was called; call it again after a change of adapters. print() shows all of it."""

    modules: tuple[ModuleReport, ...]
    """All adapted modules, in the model's order."""
    groups: tuple[tuple[str, ...], ...]
    """Paths of the modules that are computed together, in order of their calls."""
    notes: tuple[str, ...] = field(default=())
    """What else the user should know, in sentences."""
    calls: tuple[Calls, ...] = field(default=(), repr=False, compare=False)

    @property
    def accelerated(self) -> int:
        """Modules that packlora's operator computes."""
        return sum(module.accelerated for module in self.modules)

    def served(self) -> dict[str, ModuleCalls]:
        """What really happened since accelerate(), by path of the modules whose forward it replaced: calls in forwards, and in
        recomputations of checkpointing; none of those inside of compiled graphs."""
        return {calls.path: ModuleCalls(calls.served, dict(calls.left)) for calls in self.calls}

    def __str__(self) -> str:
        together = sum(len(group) for group in self.groups)
        lines = [
            f"packlora: {self.accelerated} of {len(self.modules)} adapted modules accelerated, "
            f"{together} of them in {len(self.groups)} sibling groups"
        ]
        texts: dict[tuple[str, str], list[str]] = {}
        for module in self.modules:
            if module.reason is not None:
                text = f"PEFT's own forward: {module.reason}"
            else:
                siblings = ", ".join(path.rpartition(".")[2] for path in module.group)
                text = f"plan {module.plan}" + (f", with {siblings}" if siblings else "")
            texts.setdefault((re.sub(r"\d+", "{}", module.path), f"{module.kind}: {text}"), []).append(module.path)
        rows = [(_ranges(paths), text) for (_, text), paths in texts.items()]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(lines + [f"  {name:<{width}}  {text}" for name, text in rows] + [f"  {n}" for n in self.notes])


def accelerate(
    model: torch.nn.Module,
    *,
    plan: Plan | None = None,
    example: Mapping[str, Any] | None = None,
    recompute: bool = False,
    keep_outputs: bool = False,
) -> Report:
    """Run the LoRA layers of a PEFT model on packlora's operator, in place.

    Every `peft.tuners.lora.Linear` gets another `forward`, which at each call computes what PEFT would, or hands over to
    PEFT's forward where it cannot (merged, disabled or several adapters, variants such as aLoRA, quantised bases, ...). Layers
    that one parent gives the same tensor (q, k, v; gate, up) are computed by one call; they are found by running the model
    once on two tokens, without gradients. DoRA on embeddings, convolutions and transformers' Conv1D is computed one by one,
    with a norm that is kept until the adapter changes.

    With lora_dropout, masks differ from those that PEFT would draw: they come from torch's generator all the same, and
    siblings share one. Call it again after adapters were added to new modules; a second call changes nothing else.

    Args:
        model: made by peft.get_peft_model, PeftModel.from_pretrained or model.add_adapter.
        plan: the way to compute every layer; None chooses one by the device and the sizes.
        example: keyword arguments for the run that finds siblings; by default two random token ids.
        recompute: outputs of RMS norms and the products inside gated feed-forwards, which LoRA layers read, are computed
            again in the backward instead of being kept. Saves a fifth of the memory of an 8B model, costs 2 % of its time.
            What is not surely the same then, such as a product under dropout, is kept.
        keep_outputs: DoRA layers whose outputs nobody writes into keep nothing beside them for the gradient of the magnitude;
            otherwise, and where this is off, a tensor as large as the output. liger's gated activations, which overwrite
            outputs in the backward, get copies where that lets more layers do so. Which ones is found by running the example
            forward and backward, in train mode; by default twice, on 2 and on 40 tokens. It is not assumed for ever: where
            another device or dtype, or code that was replaced since (liger applied by a Trainer), tells that the run stands
            for nothing any more, the layers keep the tensor again. What it cannot know is a kernel that writes into a layer's
            output, behind autograd's back, only on inputs unlike the example's: there magnitudes would get wrong gradients.
            With an operation of torch that works in place, autograd refuses the backward.
            An element of a magnitude that becomes exactly 0 afterwards gets no gradient.

    Raises:
        ValueError: the model has no PEFT layers, or is compiled already.
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "the model is compiled already; call packlora.accelerate(model) first, then torch.compile(model)"
        )
    layers = {path: module for path, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no PEFT adapter layers; accepted is a model from peft.get_peft_model, "
            "PeftModel.from_pretrained or model.add_adapter"
        )
    restore(model)
    text = None if plan is None else json.dumps(plan.to_dict())
    forwards: dict[str, LayerForward] = {}
    others: dict[str, DoraForward] = {}
    foreign: dict[str, str] = {}
    norms = RowNorms()
    for path, layer in layers.items():
        if "forward" in layer.__dict__:
            foreign[path] = "its forward was replaced by other code"
        elif (served := peft_dora.forward_for(layer, path, norms)) is not None:
            others[path] = served
        elif type(layer) is PeftLinear:
            forwards[path] = LayerForward(layer, path, text, norms)
        else:
            foreign[path] = peft_dora.NOT_DORA
    notes: list[str] = []
    groups: list[tuple[str, ...]] = []
    if forwards:
        try:
            groups = sibling_groups(model, list(forwards), _example(model) if example is None else example)
        except Exception as error:  # any model, any error: layers are computed one by one then, and the report says so
            notes.append(
                "sibling groups: none, the run that finds them failed "
                f"({_named(error)}); "
                "pass example={...}, keyword arguments of the model's forward"
            )
    for paths in groups:
        group = SiblingGroup([forwards[path] for path in paths], compute, LayerCall)
        group.attach(model.get_submodule(paths[0].rpartition(".")[0]))
        for index, path in enumerate(paths):
            forwards[path].group, forwards[path].index = group, index
    if recompute:  # before projections get other forwards
        found, left = add_recipes(model)
        alone: dict[str, list[str]] = {}
        for path, reason in left.items():
            alone.setdefault(reason, []).append(path)
        notes += [found, *(f"kept: {', '.join(_grouped(paths))}: {reason}" for reason, paths in alone.items())]
    for forward in forwards.values():
        forward.install()
    for other in others.values():
        other.install()
    for tuner in model.modules():
        if isinstance(tuner, BaseTuner):
            for name in _Unload.NAMES:
                tuner.__dict__[name] = _Unload(model, tuner, name)
    if any(getattr(layer, "lora_magnitude_vector", None) for layer in layers.values()):
        entries = _entries(model, [*forwards, *others])
        for entry in entries:
            norms.attach(entry)
        notes += _keep_outputs(model, forwards, example, entries) if keep_outputs else []
    return _report(model, layers, forwards, others, foreign, groups, notes)


def restore(model: torch.nn.Module) -> None:
    """Undo accelerate(model): every layer has PEFT's own forward again. Nothing to do is not an error. merge_and_unload() and
    unload() of PEFT do it by themselves."""
    for module in model.modules():
        remove_recipes(module)
        OwnForward.remove(module)
        _Unload.remove(module)
        SiblingGroup.detach(module)
        RowNorms.detach(module)
        KeptOutputs.detach(module)
    in_place.undo(model)


class _Unload:
    """In the place of a method of PEFT that makes a plain model of an adapted one, which is then not to have hooks of ours."""

    NAMES = ("merge_and_unload", "unload")

    def __init__(self, model: torch.nn.Module, tuner: BaseTuner, name: str) -> None:
        self.model, self.tuner, self.name = model, tuner, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        restore(self.model)
        return getattr(self.tuner, self.name)(*args, **kwargs)

    @staticmethod
    def remove(module: torch.nn.Module) -> None:
        for name in _Unload.NAMES:
            if isinstance(module.__dict__.get(name), _Unload):
                del module.__dict__[name]


def _entries(model: torch.nn.Module, paths: Sequence[str]) -> list[torch.nn.Module]:
    """The modules through which all of these layers are called: the model and, for methods such as generate() that call one
    inside of it, those that have all of the layers."""
    entries, prefix = [model], ""
    parts = [path.split(".")[:-1] for path in paths]
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        prefix = f"{prefix}.{names[0]}" if prefix else names[0]
        entries.append(model.get_submodule(prefix))
    return entries


def _keep_outputs(
    model: torch.nn.Module,
    forwards: Mapping[str, LayerForward],
    example: Mapping[str, Any] | None,
    entries: Sequence[torch.nn.Module],
) -> list[str]:
    """Find the DoRA layers that may keep their outputs, and let them; notes for the report."""
    could = {path: forward.could_keep_output() for path, forward in forwards.items()}
    wanted = [path for path, possible in could.items() if possible]
    others = sum(possible is False for possible in could.values())
    because = f"; {others} with a frozen bias, dropout or a magnitude of 0 keep it" if others else ""
    if not wanted:
        return [f"DoRA: a product is kept for the gradient of every magnitude{because}"] if others else []
    plans = {path: forward.plan for path, forward in forwards.items()}
    chain = json.dumps(CHAIN.to_dict())
    examples = _examples(model) if example is None else [example]
    try:
        for forward in forwards.values():  # nothing is compiled or packed for these few tokens
            forward.plan = forward.plan or chain
        found, spared = in_place.watched(model, wanted, lambda: untouched_outputs(model, wanted, examples))
    except Exception as error:  # any model, any error: products are kept then, and the report says so
        return [f"DoRA: outputs are not kept, the run that watches them failed ({_named(error)})"]
    finally:
        for path, forward in forwards.items():
            forward.plan = plans[path]
            forward.states.clear()
    outputs = KeptOutputs(model, found, (LayerForward, DoraForward))
    for path in found:
        forwards[path].outputs = outputs
    if found:
        for entry in entries:
            outputs.attach(entry)
    written = ", ".join(_grouped([path for path in wanted if path not in found]))
    return [
        f"DoRA: {len(found)} of {len(wanted)} layers keep their output for the gradient of the magnitude"
        + (
            f", not a product beside it; written into, returned or not run: {written}"
            if written
            else ", not a product beside it"
        )
        + because
        + (f"; {spared} gated activations of liger's work on copies in the backward" if spared else "")
    ]


def _examples(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two token ids, and WATCHED of two sequences with padding, as in training, where nothing is cached."""
    text = _text_config(model)
    length = min(WATCHED, getattr(text, "max_position_embeddings", None) or WATCHED)
    longer = _example(model, length)
    longer.update(padded(longer["input_ids"]))
    if "decoder_input_ids" in longer:
        longer["decoder_input_ids"] = longer["input_ids"]
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    training = {"use_cache": False} if "use_cache" in inspect.signature(base.forward).parameters else {}
    return [{**_example(model), **training}, {**longer, **training}]


def _text_config(model: torch.nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _example(model: torch.nn.Module, length: int = 2) -> dict[str, Any]:
    """Token ids for a language model, on the device of its embedding."""
    config: Any = getattr(model, "config", None)
    text = _text_config(model)
    vocab = getattr(text, "vocab_size", None)
    if not isinstance(vocab, int):
        raise ValueError("the model's config names no vocab_size")
    find: Any = getattr(model, "get_input_embeddings", None)
    embedding = find() if find is not None else None
    device = next((embedding if isinstance(embedding, torch.nn.Module) else model).parameters()).device
    ids = torch.randint(0, vocab, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    example: dict[str, Any] = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        example["decoder_input_ids"] = ids
    return example


def _report(
    model: torch.nn.Module,
    layers: Mapping[str, BaseTunerLayer],
    forwards: Mapping[str, LayerForward],
    others: Mapping[str, DoraForward],
    foreign: Mapping[str, str],
    groups: list[tuple[str, ...]],
    notes: list[str],
) -> Report:
    group_of = {path: group for group in groups for path in group}
    modules: list[ModuleReport] = []
    devices: dict[torch.device, None] = {}
    for path, layer in layers.items():
        kind = f"{type(layer).__module__.removeprefix('peft.tuners.').partition('.')[0]}.{type(layer).__name__}"
        if path in foreign:
            modules.append(ModuleReport(path, kind, reason=foreign[path]))
            continue
        if path in others:
            why = others[path].ready()
            if isinstance(why, str):
                modules.append(ModuleReport(path, kind, reason=why))
            else:
                modules.append(ModuleReport(path, kind, peft_dora.PLAN))
            continue
        call = forwards[path].ready()
        if isinstance(call, str):
            modules.append(ModuleReport(path, kind, reason=call))
            continue
        devices[call.weight.device] = None
        group = [forwards[other].ready() for other in group_of.get(path, (path,))]
        calls = [other for other in group if isinstance(other, LayerCall)]
        modules.append(ModuleReport(path, kind, _plan(calls).name, group_of.get(path, ())))
    for path, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            kind = type(module).__name__
            modules.append(ModuleReport(path, kind, reason="trained itself, not through LoRA"))
    for device in devices:
        if reason := why_no_kernels(device):
            notes.append(f"{device}: plain matrix products, {reason}")
    warned, counted = Warned(), []
    for module_report in modules:
        forward = forwards.get(module_report.path) or others.get(module_report.path)
        if forward is not None:
            forward.calls = Calls(module_report.path, module_report.accelerated, warned)
            counted.append(forward.calls)
    return Report(tuple(modules), tuple(groups), tuple(notes), tuple(counted))


def _plan(calls: list[LayerCall]) -> Plan:
    first = calls[0]
    dora = any(call.magnitude is not None for call in calls)
    if first.owner.plan is not None:
        drops = first.p > 0
        double = first.weight.dtype == torch.float64
        call = Situation(True, True, drops, dora, dora and drops, double)
        return legal(Plan.from_dict(json.loads(first.owner.plan)), call)
    sizes, ranks = tuple(len(call.weight) for call in calls), tuple(len(call.A) for call in calls)
    weight = first.weight
    return choose_plan(weight.device, weight.dtype, NOMINAL_TOKENS, weight.shape[1], sizes, ranks, first.p, dora)


def _named(error: Exception) -> str:
    """Type and first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _grouped(paths: list[str]) -> list[str]:
    """Names of paths, one for those that differ in numbers alone."""
    like: dict[str, list[str]] = {}
    for path in paths:
        like.setdefault(re.sub(r"\d+", "{}", path), []).append(path)
    return [_ranges(own) for own in like.values()]


def _ranges(paths: list[str]) -> str:
    """One name for paths that differ in numbers: `layers.{0-31}.q_proj`."""
    if len(paths) == 1:
        return paths[0]
    columns = list(zip(*(map(int, re.findall(r"\d+", path)) for path in paths), strict=True))
    if sum(len(set(column)) > 1 for column in columns) > 1:
        return f"{paths[0]} and {len(paths) - 1} more like it"
    pieces = re.split(r"\d+", paths[0])
    name = pieces[0]
    for column, piece in zip(columns, pieces[1:], strict=True):
        name += (str(column[0]) if len(set(column)) == 1 else f"{{{_spans(sorted(set(column)))}}}") + piece
    return name


def _spans(numbers: list[int]) -> str:
    """0-3,5 for 0, 1, 2, 3, 5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)
