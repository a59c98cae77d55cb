"""packlora.accelerate: any PEFT LoRA or DoRA model, in place, on this package's operator.

    import packlora
    print(packlora.accelerate(model))      # which modules run on it, by which plan, and which do not, and why
    packlora.restore(model)                # everything as before

The model stays PEFT's: same Parameters, same state_dict keys, same files, same results. served.py says what stands in the place
of a layer's forward, by the kind of its base layer: layers.py for linear layers, experts.py and routers.py for the weights of
experts and routers, dora.py for embeddings and convolutions, tokens.py for rows of tokens. This file puts it there and takes
it off, report.py says what was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, Literal

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

from packlora.adapters.kept_outputs import described, is_overwritten
from packlora.adapters.norms import RowNorms
from packlora.adapters.siblings import SiblingGroup, join, sibling_groups
from packlora.errors import quoted
from packlora.form import PRODUCTS, plugin
from packlora.live.adapter import LayerCall
from packlora.live.foreign import left_as_they_are
from packlora.live.forward import OwnForward
from packlora.live.layers import LayerForward, compute
from packlora.live.report import Report, grouped, report_of
from packlora.live.served import forward_for, served_kind
from packlora.live.wrapped import NotWhole, inner_model, left_sharded, mend_widths, why_not_run
from packlora.ops.gpu import why_no_kernels
from packlora.ops.lora_linear.plan import Plan
from packlora.ops.modules import remove_hooks
from packlora.ops.recompute import RecomputeHooks
from packlora.plans.ask import Ask, asks_of


def accelerate(
    model: torch.nn.Module,
    *,
    plan: str | Plan | Mapping[str, str | Plan] | None = None,
    lossy: bool = False,
    prefer: Literal["time", "memory"] = "time",
    example: Mapping[str, Any] | None = None,
    recompute: bool = False,
    keep_outputs: bool = False,
    compute: Literal["dtype", "fp8", "dora_fp8"] = "dtype",
) -> Report:
    """Run the LoRA layers of a PEFT model on packlora's operator, in place.

    Every `peft.tuners.lora.Linear` gets another `forward`, which at each call computes what PEFT would, or hands over to
    PEFT's forward where it cannot (merged, disabled or several adapters, variants such as aLoRA, ...). So does every
    `peft.tuners.lora.bnb.Linear4bit` and `Linear8bitLt` (docs/accelerate.md, "Quantised bases"). Layers
    that one parent gives the same tensor (q, k, v; gate, up) are computed by one call; they are found by running the model
    once on two tokens, without gradients. Adapters of experts (`target_parameters`) are computed by a grouped operator, those
    of routers as those of linear layers; DoRA on embeddings and convolutions one by one, with a norm that is kept until the
    adapter changes; rows of tokens (`trainable_token_indices`) without a copy of the weight.

    With lora_dropout, masks differ from those that PEFT would draw: they come from torch's generator all the same, and
    siblings share one. Call it again after adapters were added to new modules; a second call changes nothing else.

    Args:
        model: made by peft.get_peft_model, PeftModel.from_pretrained or model.add_adapter; or what DDP or FSDP has made of
            one, then on every rank (docs/accelerate.md, "Under parallel wrappers").
        plan: how to compute layers (docs/accelerate.md, "Choosing the computation").
            None or "measured": what `packlora tune` measured on this device, else a cost model on a GPU, the chain on a CPU.
            "flops": the fewest floating-point operations by RunLoRA's formulas.
            A plan's name, such as "forward1-backward2" or "chain", or a Plan; the plain chain takes its place for calls that it
            does not compute, and the report says why.
            A mapping from patterns to these: layers that a pattern matches as in PEFT's rank_pattern, the first one that does;
            the others are measured. Siblings with different values are computed apart. Of no use in compiled graphs.
        lossy: "measured" and "flops" may choose plans that merge W + s B A, which round more than the chain; and such plans
            may be named. Without it a named plan that rounds more on the device gives way, too.
        prefer: with "memory", "measured" and "flops" do not keep S [tokens, rank] for the backward where making it again is
            estimated to cost at most 5 % of a layer's time, forward and backward.
        example: keyword arguments for the run that finds siblings; by default two random token ids.
        recompute: outputs of RMS norms and the products inside gated feed-forwards, which LoRA layers read, are computed
            again in the backward instead of being kept. Saves a fifth of the memory of an 8B model, costs 2 % of its time.
            What is not surely the same then, such as a product under dropout, is kept.
        keep_outputs: DoRA layers without a bias, dropout or a 0 in the magnitude keep their output for the gradient of the
            magnitude; otherwise a tensor as large beside it. Where an operation of torch writes into such an output,
            autograd refuses the backward ("modified by an inplace operation"): leave it off then. Outputs that liger's kernels
            overwrite are not kept. Other kernels that write in place behind autograd's back are not noticed, and magnitudes
            would get wrong gradients: leave it off for models that have them. An element of a magnitude that becomes exactly
            0 afterwards gets no gradient.
        compute: "fp8": products of base weights, forward and for the gradient of the input, are in FP8 (docs/accelerate.md,
            "Products in FP8"); "dora_fp8": only the second one of DoRA under dropout. Codes take as much as 16 bits a number.

    Returns:
        What was found: print it.

    Raises:
        ValueError: the model is no module, has no PEFT layers, or is compiled already; plan, lossy, prefer, recompute,
            keep_outputs or compute is not one of the accepted values, a plan that rounds more is named without `lossy`, a
            pattern matches no linear layer with an adapter, or no layer can be computed in FP8.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"the model is {quoted(model)}, not a torch.nn.Module; of a Trainer it is trainer.model")
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "the model is compiled already; call packlora.accelerate(model) first, then torch.compile(model)"
        )
    model = inner_model(model)
    layers = {path: module for path, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no PEFT adapter layers; accepted is a model from peft.get_peft_model, "
            "PeftModel.from_pretrained or model.add_adapter"
        )
    asks = _asks(model, layers, plan, lossy, prefer)
    _check_values(recompute, keep_outputs, compute)
    restore(model)
    norms = RowNorms()
    forwards: dict[str, OwnForward] = {}
    foreign: dict[str, str] = {}
    for path, layer in layers.items():
        forward = forward_for(layer, path, norms, asks, forwards)
        if isinstance(forward, str):
            foreign[path] = forward
        else:
            forwards[path] = forward
    linear = {path: forward for path, forward in forwards.items() if isinstance(forward, LayerForward)}
    notes = mend_widths(layers.values())
    if compute != "dtype":
        notes += plugin(PRODUCTS).compute_in_fp8(linear, compute)
    found = {path: forward.ready() for path, forward in forwards.items()}
    groups, more = _group(model, forwards, found, example)
    notes += more
    if recompute:  # before projections get other forwards
        notes += _recompute(model)
    for forward in forwards.values():
        forward.install()
    for tuner in model.modules():
        if isinstance(tuner, BaseTuner):
            for name in _Unload.NAMES:
                tuner.__dict__[name] = _Unload(model, tuner, name)
    if any(getattr(layer, "lora_magnitude_vector", None) for layer in layers.values()):
        for entry in _entries(model, list(forwards)):
            norms.attach(entry)
    if keep_outputs:
        notes += _keep_outputs(model, linear, found)
    notes += _why_no_kernels(found)
    return report_of(model, layers, forwards, foreign, found, groups, notes)


def restore(model: torch.nn.Module) -> None:
    """Undo accelerate(model): every layer has PEFT's own forward again. Nothing to do is not an error. merge_and_unload() and
    unload() of PEFT do it by themselves."""
    for module in model.modules():
        remove_hooks(module, RecomputeHooks)
        OwnForward.remove(module)
        _Unload.remove(module)
        SiblingGroup.detach(module)
        RowNorms.detach(module)


class _Unload:
    """Stand-in for a method of PEFT that makes a plain model of an adapted one, which is then not to have hooks of ours."""

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


# --- steps of accelerate ------------------------------------------------------------------------------------------------


def _check_values(recompute: object, keep_outputs: object, compute: object) -> None:
    for name, value in (("recompute", recompute), ("keep_outputs", keep_outputs)):
        if type(value) is not bool:
            raise ValueError(f"{name} is {quoted(value)}; accepted are True and False")
    if compute not in ("dtype", "fp8", "dora_fp8"):
        raise ValueError(f"compute is {quoted(compute)}; accepted are 'dtype', 'fp8' and 'dora_fp8'")


def _asks(
    model: torch.nn.Module, layers: Mapping[str, BaseTunerLayer], plan: object, lossy: bool, prefer: str
) -> dict[str, Ask]:
    """Plans that the user wants for PEFT's linear layers, by path. Patterns are compared with paths in the model that PEFT
    adapts."""
    tuners = [path for path, module in model.named_modules() if isinstance(module, BaseTuner)]
    inner = [f"{path}.model.".removeprefix(".") for path in tuners]
    paths = [path for path, layer in layers.items() if served_kind(layer) == "linear"]
    own = {path: next((path.removeprefix(start) for start in inner if path.startswith(start)), path) for path in paths}
    return asks_of(plan, lossy, prefer, paths, own)


def _group(
    model: torch.nn.Module, forwards: Mapping[str, OwnForward], found: dict[str, object], example: Mapping[str, Any] | None
) -> tuple[list[tuple[str, ...]], list[str]]:  # fmt: skip
    """Find siblings and put them in groups; paths by group, and notes for the report.

    found: what `ready` gives of layers. Where operands are not whole now, what it gives when the layer runs takes its place.
    """
    linear = {
        path: forward
        for path, forward in forwards.items()
        if isinstance(forward, LayerForward) and forward.has_siblings
    }
    if not linear and not any(isinstance(own, NotWhole) for own in found.values()):
        return [], []
    if reason := why_not_run(model):
        return [], [f"sibling groups: none, {reason}"]
    try:
        with left_sharded(model), left_as_they_are(model), _seen_running(forwards, found):
            groups = sibling_groups(model, list(linear), _example(model) if example is None else example)
    except Exception as error:  # any model, any error: layers are computed one by one then, and the report says so
        first_line = (str(error).strip().splitlines() or [""])[0]
        return [], [
            f"sibling groups: none, the run that finds them failed ({type(error).__name__}: {first_line}); "
            "pass example={...}, keyword arguments of the model's forward"
        ]
    return join(model, groups, linear, lambda member: member.ask, compute, LayerCall), []


@contextmanager
def _seen_running(forwards: Mapping[str, OwnForward], found: dict[str, object]) -> Iterator[None]:
    """During a run of the model, `ready` is asked again of layers whose operands are not whole."""
    with ExitStack() as hooks:
        for path, forward in forwards.items():
            if isinstance(found[path], NotWhole):

                def look(*_: object, path: str = path, forward: OwnForward = forward) -> None:
                    call = forward.ready()
                    found[path] = call.outlined() if isinstance(call, LayerCall) else call

                hooks.enter_context(forward.layer.register_forward_pre_hook(look))
        yield


def _recompute(model: torch.nn.Module) -> list[str]:
    """Let norms and products be recomputed; notes for the report."""
    if reason := why_not_run(model):
        return [f"norms and gated products are kept: {reason}"]
    from packlora.ops.recompute_hooks import add_recompute

    with left_sharded(model):
        found, left = add_recompute(model)
    by_reason: dict[str, list[str]] = {}
    for path, reason in left.items():
        by_reason.setdefault(reason, []).append(path)
    return [found, *(f"kept: {', '.join(grouped(paths))}: {reason}" for reason, paths in by_reason.items())]


def _keep_outputs(
    model: torch.nn.Module, forwards: Mapping[str, LayerForward], found: Mapping[str, object]
) -> list[str]:
    """Let DoRA layers keep their outputs; notes for the report."""
    reasons: list[str | None] = []
    for path, forward in forwards.items():
        call, now = found[path], forward.ready()
        if isinstance(call, LayerCall) and call.magnitude is not None and call.magnitude.requires_grad:
            whole = isinstance(now, LayerCall)
            reasons.append(forward.use_output(model, is_overwritten(model, path)) if whole else "sharded magnitudes")
    return [described(reasons)] if reasons else []


def _why_no_kernels(found: Mapping[str, object]) -> list[str]:
    """Notes for the report on devices where layers are computed without this package's kernels."""
    devices = dict.fromkeys(call.weight.device for call in found.values() if isinstance(call, LayerCall))
    reasons = {device: why_no_kernels(device) for device in devices}
    return [f"{device}: plain matrix products, {reason}" for device, reason in reasons.items() if reason]


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


def _example(model: torch.nn.Module) -> dict[str, Any]:
    """Two token ids for a language model, on the device of its embedding."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocab = getattr(text, "vocab_size", None)
    if not isinstance(vocab, int):
        raise ValueError("the model's config names no vocab_size")
    find: Any = getattr(model, "get_input_embeddings", None)
    embedding = find() if find is not None else None
    own = embedding.parameters() if isinstance(embedding, torch.nn.Module) else ()
    device = next(chain(own, model.parameters())).device  # an embedding in a flat parameter of FSDP has none
    ids = torch.randint(0, vocab, (1, 2), generator=torch.Generator().manual_seed(0)).to(device)
    example: dict[str, Any] = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        example["decoder_input_ids"] = ids
    return example
