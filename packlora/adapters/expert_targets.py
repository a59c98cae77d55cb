"""Parameters of a model with experts that an adapter means: those of all experts of a layer, and those of routers.

transformers keeps the weights of a layer's experts as two parameters of three dimensions, and a router's as one of two. PEFT
adapts them by name (`target_parameters`). Names of the linear layers that experts once were mean these parameters to it:
that translation is PEFT's own, and so is the set of what `all-linear` takes.

Experts are served where transformers calls them through its registry of experts' functions, whatever their model is; routers
where they multiply what they are given with their weight once. All other parameters are refused by name.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from packlora.adapters.expert_layout import is_experts, weight_names
from packlora.adapters.kinds import Kind, kind_of_parameter
from packlora.errors import InputError, quoted
from packlora.lora_config import LoraConfig, is_all_linear, rank_and_alpha
from packlora.patterns import is_named, pattern_key

PROBE_ROWS = 16


@dataclass(frozen=True, slots=True)
class ParameterTarget:
    """A parameter that an adapter means. stored_at: under which module path PEFT's files have its tensors."""

    kind: Kind
    stored_at: str


def as_peft_takes_it(peft: LoraConfig, model: PreTrainedModel, job: str) -> LoraConfig:
    """The configuration with parameters in the place of names that mean experts or routers of this model to PEFT, where
    transformers converts such models.

    It is the same object where there are none. Of all-linear, which names none of them, what cannot be adapted is left out.

    Raises:
        InputError: the names mean one half of what is one parameter, or one that cannot be adapted.
    """
    asked = peft.target_modules
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = copy.deepcopy(peft)
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError as error:
        raise InputError(f"job {job!r}: target_modules {quoted(_shown(asked), 300)}: {error}") from None
    if not config.target_parameters or set(config.target_parameters) == set(peft.target_parameters or ()):
        return peft
    if isinstance(asked, str):  # among the names that PEFT finds for an expression are those of parameters
        modules = [path for path, _ in model.named_modules()]
        config.target_modules = {
            name for name in config.target_modules if any(is_named(path, name) for path in modules)
        }
    written, meant = set(peft.target_parameters or ()), set(config.target_parameters)
    config.target_parameters = written.union(*(_fitting(name, model, asked, job) for name in meant - written))
    paths = [
        path for path, _ in model.named_parameters() if any(is_named(path, name) for name in config.target_parameters)
    ]
    for patterns, own in ((config.rank_pattern, peft.rank_pattern), (config.alpha_pattern, peft.alpha_pattern)):
        for pattern in patterns.keys() - own.keys():  # of what PEFT fuses, where this model may have nothing
            if not any(pattern_key([pattern], path) == pattern for path in paths):
                del patterns[pattern]
    return config


def _fitting(name: str, model: PreTrainedModel, asked: Any, job: str) -> set[str]:
    """Select, of the parameters that a name stands for, which PEFT has for names in target_modules, those that can be adapted:
    the name itself where all can. Raises InputError where one cannot and was named."""
    found = {path: why_unfit(model, path) for path, _ in model.named_parameters() if is_named(path, name)}
    unfit = {path: reason for path, reason in found.items() if reason is not None}
    if unfit and not is_all_linear(asked):
        path, reason = next(iter(unfit.items()))
        raise InputError(
            f"job {job!r}: target_modules {quoted(_shown(asked), 300)} is read by PEFT as {path}{reason}; leave it out"
        )
    fit = found.keys() - unfit.keys()
    return set(fit) if unfit else {name} if fit else set()


def parameter_targets(
    peft: LoraConfig, model: PreTrainedModel, job: str, twins: Iterable[str] = ()
) -> dict[str, ParameterTarget]:
    """The parameters that `target_parameters` means, by their path, in model order.

    Args:
        twins: see spec.resolve.

    Raises:
        InputError: a name matches nothing, or a parameter that cannot be adapted.
    """
    wanted = sorted(peft.target_parameters or ())
    found: dict[str, ParameterTarget] = {}
    matched: set[str] = set()
    for owner, module in model.named_modules() if wanted else ():
        own: list[str] = []
        for leaf, _ in module.named_parameters(recurse=False):
            path = f"{owner}.{leaf}"
            if names := [name for name in wanted if is_named(path, name)]:
                matched.update(names)
                if (reason := why_unfit(model, path)) is not None:
                    raise InputError(f"job {job!r}: target_parameters matches {path}{reason}; leave it out")
                own.append(leaf)
        for at, leaf in enumerate(own):  # PEFT wraps a module once for each, the last one outermost
            kind = kind_of_parameter(module, leaf)
            found[f"{owner}.{leaf}"] = ParameterTarget(kind, owner + ".base_layer" * (len(own) - 1 - at))
    for name in wanted:
        if name not in matched and not any(is_named(one, name) for one in twins):
            raise InputError(
                f"job {job!r}: target_parameters names {quoted(name, 300)}, which matches nothing in the model; "
                + _what_experts(model)
            )
    return found


def _what_experts(model: PreTrainedModel) -> str:
    """Under which names a model has experts, for a message."""
    joined = sorted({re.sub(r"^.*\.\d+\.", "", path) for path, p in model.named_parameters() if p.ndim == 3})
    if joined:
        return f"parameters of its experts are {', '.join(joined)}"
    apart = sorted(
        {
            found.group(1)
            for path, _ in model.named_modules()
            if (found := re.search(r"experts?\.\d+\.(?:.*\.)?(\w+)$", path))
        }
    )
    if apart:
        return f"its experts are layers of their own, {', '.join(apart)}, which target_modules takes"
    routed = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    return "its experts have no weights of that name" if routed else "it has no experts"


def why_unfit(model: PreTrainedModel, path: str) -> str | None:
    """Why a parameter cannot be adapted, to be read after its path; None where it can."""
    owner, _, leaf = path.rpartition(".")
    module, parameter = model.get_submodule(owner), model.get_parameter(path)
    kind = type(module).__name__
    if isinstance(module, torch.nn.Embedding) or module is model.get_output_embeddings():
        return ", of the output layer or the embeddings"
    if kind_of_parameter(module, leaf) == "linear":
        return None
    if not parameter.is_floating_point():
        return f", which holds codes of type {parameter.dtype}, and adapters are put on weights"
    if is_experts(module):
        weights = weight_names(module)
        known = leaf in weights and parameter.ndim == 3
        return None if known else f" of {kind}; of experts the weights can be adapted: {', '.join(weights)}"
    if parameter.ndim == 2 and leaf == "weight":
        try:
            router_product(module, parameter)
        except ValueError as error:
            return f" of {kind}, which cannot be adapted: {error}"
        return None
    if parameter.ndim == 3:
        return f" of {kind}, whose experts transformers does not call through its registry of experts' functions"
    return f" of {kind}, a parameter of {parameter.ndim} dimensions"


def router_product(router: torch.nn.Module, weight: torch.Tensor) -> torch.dtype:
    """Dtype in which a router multiplies what it is given with its weight [E, K].

    Raises:
        ValueError: it does not do so once, by torch.nn.functional.linear.
    """
    watch = Watched(weight)
    rows = torch.zeros(PROBE_ROWS, weight.shape[1], dtype=weight.dtype, device=weight.device)
    failed: str | None = None
    try:
        with torch.no_grad(), watch:
            router(rows)
    except Exception as error:  # any code of a model
        failed = str(error).strip().split("\n")[0]
    if len(watch.found) != 1:
        raise ValueError(failed or f"it multiplies with it {len(watch.found)} times, not once")
    return watch.found[0]


class Watched(TorchFunctionMode):
    """Follows a weight through casts to the products with it.

    found: their types.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.seen = [weight]
        self.found: list[torch.dtype] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and self._is_seen(args[1] if len(args) > 1 else kwargs.get("weight")):
            return self.product(func, args, kwargs)
        out = func(*args, **kwargs)
        if func in (torch.Tensor.type, torch.Tensor.to, torch.Tensor.float) and self._is_seen(args[0]):
            self.seen.append(out)
        return out

    def product(self, linear: Any, args: Any, kwargs: Any) -> Any:
        """Note the weight's dtype, then compute the product."""
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        self.found.append(weight.dtype)
        return linear(*args, **kwargs)

    def _is_seen(self, tensor: Any) -> bool:
        return any(tensor is one for one in self.seen)


class RouterProduct(Watched):
    """While a router runs, its product with its weight is made by `product`, of what is multiplied and of the weight as it is
    multiplied with."""

    def __init__(self, weight: torch.Tensor, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(weight)
        self.make = product

    def product(self, linear: Any, args: Any, kwargs: Any) -> Any:
        operands = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        y = self.make(operands["input"], operands["weight"])
        return y if (bias := operands.get("bias")) is None else y + bias


def _shown(targets: Any) -> str:
    return targets if isinstance(targets, str) else ", ".join(sorted(targets or ()))


def divided_ranks(peft: LoraConfig, model: PreTrainedModel, job: str) -> LoraConfig:
    """The configuration with the rank of experts divided by the number of experts that a token goes to, so that a token meets
    as many ranks as it would in a dense layer. Scalings stay as they are: rank_pattern and alpha_pattern say both.

    Raises:
        InputError: there are no experts among the targets, or their rank is no multiple of that number.
    """
    peft = copy.copy(as_peft_takes_it(peft, model, job))
    text = model.config.get_text_config()
    top_k = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None)
    paths = [path for path, found in parameter_targets(peft, model, job).items() if found.kind == "experts"]
    if not paths or not isinstance(top_k, int):
        raise InputError(
            f"job {job!r}: adapter.expert_rank is r // top_k, but the adapter takes no experts; leave it out"
        )
    own: dict[str, tuple[int, float]] = {}
    for path in paths:
        rank, alpha = rank_and_alpha(peft, path)
        if rank % top_k:
            raise InputError(
                f"job {job!r}: adapter.expert_rank is r // top_k, but the rank {rank} of {path} is no multiple of the {top_k} "
                "experts that a token goes to"
            )
        own[path] = rank // top_k, alpha / (math.sqrt(top_k) if peft.use_rslora else top_k)
    by_name: dict[str, set[tuple[int, float]]] = {}
    for path, settings in own.items():
        by_name.setdefault(".".join(path.split(".")[-2:]), set()).add(settings)
    patterns = {re.escape(name): next(iter(found)) for name, found in by_name.items() if len(found) == 1}
    patterns |= {re.escape(p): own[p] for p in paths if len(by_name[".".join(p.split(".")[-2:])]) > 1}
    peft.rank_pattern = {name: rank for name, (rank, _) in patterns.items()} | dict(peft.rank_pattern)
    peft.alpha_pattern = {
        name: int(alpha) if alpha.is_integer() else alpha for name, (_, alpha) in patterns.items()
    } | dict(peft.alpha_pattern)
    return peft
