"""A PEFT model that is trained under a parallel wrapper, with and without accelerate(): how far apart the two are.

`answers(rank, cases)` runs on every rank of a process group. For each case two models with the same weights train for three
steps, one as PEFT computes it, one accelerated, on data that each rank has for itself, with an evaluation after every step.
Compared is all that a rank has: outputs, gradients and parameters, or its shards of them.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from conftest import tiny_model
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import packlora
from packlora.ops.dropout.keys import dropout_factor, dropped

SMALL = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        wrapper: a key of WRAPPERS.
        when: accelerate() gets the model "before" it is wrapped, the wrapped one "after", or "inside", the model that was
            wrapped, afterwards.
        frozen: adapters' parameters with this in their names are not trained.
        thawed: the base model's parameters with this in their names are trained.
        accumulate: microbatches a step; all but the last one without synchronisation.
        checkpointing: "" or "plain" or "reentrant".
        compiled: "" or "outside", the wrapped model, or "inside", the model that is wrapped.
        adapters: with two, the first, the second, then both are active, one a step.
        layers: of the model.
        options: of accelerate().
    """

    wrapper: str
    when: str = "before"
    dora: bool = False
    dropout: float = 0.0
    frozen: str = ""
    thawed: str = ""
    accumulate: int = 1
    checkpointing: str = ""
    compiled: str = ""
    adapters: int = 1
    layers: int = 2
    dtype: torch.dtype = torch.float64
    options: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        plain = Case(self.wrapper)
        changed = [f"{n}={v}" for n, v in vars(self).items() if v != getattr(plain, n) and n != "wrapper"]
        return " ".join([self.wrapper, *changed])

    @property
    def plain(self) -> Case:
        """As PEFT trains it; the same for cases that differ in what only accelerate() knows."""
        return replace(self, when="", options=(), compiled="")


def adapted(case: Case) -> Any:
    """The PEFT model, the same on every rank, in train mode."""
    config: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "lora_dropout": case.dropout}
    config |= {"use_dora": case.dora, **dict(case.settings)}
    base = tiny_model("llama", case.dtype, **SMALL, num_hidden_layers=case.layers)
    base.config.use_cache = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(base, LoraConfig(**config), autocast_adapter_dtype=False)
        for number in range(1, case.adapters):
            model.add_adapter(f"other{number}", LoraConfig(**config | {"r": 3 + number}), autocast_adapter_dtype=False)
        if case.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": case.checkpointing == "reentrant"})
            model.enable_input_require_grads()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            parameter.data = parameter.data * (1 + 0.1 * noise) if "magnitude" in name else noise * 0.2
        if case.frozen and case.frozen in name:
            parameter.requires_grad_(False)
        if case.thawed and case.thawed in name:
            parameter.requires_grad_(True)
    return model.double().train() if case.dtype == torch.float64 else model.train()


class SameMasks(nn.Module):
    """Dropout for PEFT with the masks that accelerate() draws: one for all layers of a parent that read one tensor, from
    torch's generator when the first of them is called."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.keys = p, None

    def begin(self, *_: Any) -> None:
        self.keys = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        T, K = x.numel() // x.shape[-1], x.shape[-1]
        if self.keys is None:
            self.keys = torch.randint(-(2**31), 2**31, (T, 2), dtype=torch.int32)
        mask = dropped(self.keys, 0, K, self.p).view(x.shape)
        return x.masked_fill(mask, 0.0) * dropout_factor(self.p)


def give_same_masks(model: Any, p: float, alone: bool) -> None:
    """alone: siblings are computed one by one, each with a mask of its own."""
    for names in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
        for module in list(model.modules()):
            layers = [getattr(module, name) for name in names if hasattr(getattr(module, name, None), "lora_dropout")]
            for group in [[layer] for layer in layers] if alone else [layers]:
                masks = SameMasks(p)
                module.register_forward_pre_hook(masks.begin)
                for layer in group:
                    layer.lora_dropout["default"] = masks


# --- wrappers ----------------------------------------------------------------------------------------------------------


def blocks(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]


def parts(model: Any) -> list[Any]:
    return [part for block in blocks(model) for part in (block.self_attn, block.mlp)]


def linears(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def leaves(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def factors(model: Any) -> list[Any]:
    return [module for layer in linears(model) for module in (layer.lora_A["default"], layer.lora_B["default"])]


def nothing(_: Any) -> list[Any]:
    return []


def sharded(model: Any, each: Callable[[Any], list[Any]] = blocks, **settings: Any) -> Any:
    """FSDP2, on these modules and the model."""
    for module in each(model):
        fully_shard(module, **settings)
    return fully_shard(model, **settings)


def flat(model: Any, **settings: Any) -> Any:
    """FSDP1, by default of every block and the model."""
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    return FSDP(model, **{"auto_wrap_policy": policy, "device_id": torch.device("cpu"), **settings})


def flat_by_peft(model: Any) -> Any:
    """FSDP1 as PEFT's documentation wraps a model: what is trained lies in units of its own."""
    return flat(model, auto_wrap_policy=fsdp_auto_wrap_policy(model), use_orig_params=False)


def replicated(**settings: Any) -> Callable[[Any], Any]:
    return lambda model: DDP(model, **settings)


def shards(each: Callable[[Any], list[Any]] = blocks, **settings: Any) -> Callable[[Any], Any]:
    return lambda model: sharded(model, each, **settings)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: model,
    "ddp": replicated(),
    "ddp unused": replicated(find_unused_parameters=True),
    "ddp static": replicated(static_graph=True),
    "ddp views": replicated(gradient_as_bucket_view=True),
    "fsdp2": shards(reshard_after_forward=True),
    "fsdp2 kept": shards(reshard_after_forward=False),
    "fsdp2 root": shards(nothing),
    "fsdp2 parts": shards(parts),
    "fsdp2 parts kept": shards(parts, reshard_after_forward=False),
    "fsdp2 linear": shards(linears),
    "fsdp2 leaves": shards(leaves),
    "fsdp2 adapters": shards(factors),
    "fsdp2 mixed": shards(reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "fsdp2 float32": shards(reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32)),
    "fsdp1": lambda model: flat(model, use_orig_params=True),
    "fsdp1 grads": lambda model: flat(model, use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "fsdp1 whole": lambda model: flat(model, auto_wrap_policy=None, use_orig_params=True),
    "fsdp1 flat": flat_by_peft,
}


# --- training ----------------------------------------------------------------------------------------------------------


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, a copy."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def clean(name: str) -> str:
    """Without what wrappers put into names."""
    for part in ("_orig_mod.", "_fsdp_wrapped_module.", "module."):
        name = name.replace(part, "")
    return name


@dataclass
class Life:
    """What a training gave, by name."""

    tensors: dict[str, torch.Tensor]
    report: Any = None
    told: list[str] = field(default_factory=list)


def data(rank: int, step: int, part: int = 0) -> torch.Tensor:
    """Token ids [2, 7] of a rank."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + part)
    return torch.randint(3, SMALL["vocab_size"], (2, 7), generator=generator)


def wrap(case: Case, accelerated: bool) -> tuple[Any, Any, Any, Any]:
    """What is called, what the wrapper returned, the PEFT model, and the report."""
    torch._dynamo.reset()
    model, report = adapted(case), None
    options = dict(case.options)
    if accelerated and case.when == "before":
        report = packlora.accelerate(model, **options)
    if case.dropout and not accelerated:
        give_same_masks(model, case.dropout, alone=case.wrapper == "fsdp2 linear")
    if case.adapters > 1:
        model.base_model.set_adapter(["default", "other1"])
    compiled = accelerated and case.compiled
    top = WRAPPERS[case.wrapper](torch.compile(model, backend="aot_eager") if compiled == "inside" else model)
    if accelerated and case.when in ("after", "inside"):
        report = packlora.accelerate(top if case.when == "after" else model, **options)
    return torch.compile(top, backend="aot_eager") if compiled == "outside" else top, top, model, report


def backward(case: Case, rank: int, step: int, called: Any, top: Any, found: dict[str, torch.Tensor]) -> None:
    """Of all microbatches of a step."""
    for part in range(case.accumulate):
        last = part == case.accumulate - 1
        if isinstance(top, FSDPModule):
            top.set_requires_gradient_sync(last)
        unsynced = not last and isinstance(top, DDP | FSDP)
        with top.no_sync() if unsynced else contextlib.nullcontext():
            ids = data(rank, step, part)
            out = called(input_ids=ids, labels=ids)
            (out.loss / case.accumulate).backward()
        found[f"{step}.{part} logits"] = local(out.logits)


def life(rank: int, case: Case, accelerated: bool) -> Life:
    """A training, as PEFT computes it or accelerated."""
    found: dict[str, torch.Tensor] = {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        called, top, model, report = wrap(case, accelerated)
        trained = [parameter for parameter in top.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.5)
        for step in range(STEPS):
            torch.manual_seed(100 * rank + step)
            if case.adapters > 1:
                model.base_model.set_adapter([["default"], ["other1"], ["default", "other1"]][step])
            backward(case, rank, step, called, top, found)
            for name, parameter in top.named_parameters():
                if parameter.grad is not None:
                    found[f"{step} grad of {clean(name)}"] = local(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            if not case.settings:  # a compiled model would be compiled once more
                top.eval()
                with torch.no_grad():
                    found[f"{step} evaluated"] = local(called(input_ids=data(rank, 50)).logits)
                top.train()
        found |= {f"last {clean(name)}": local(parameter) for name, parameter in top.named_parameters()}
    return Life(found, report, [str(w.message) for w in seen if str(w.message).startswith("packlora")])


# --- what the page says ------------------------------------------------------------------------------------------------


def said_of(kind: str) -> str:
    """Of the row of "Several GPUs" in docs/support.md that begins so, what it says of accelerate() in a word."""
    table = (Path(__file__).parents[1] / "docs" / "support.md").read_text().partition("## Several GPUs")[2]
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {kind}")]
    return row.split(" | ")[2].removesuffix(" |").partition(":")[0]


# --- what is answered --------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """Of a case, on one rank.

    Attributes:
        worst, where: the largest difference, relative where values are above 1, and of which tensor; infinite where one of the
            two has a tensor that the other has not.
        trained: how many tensors of gradients there were.
        accelerated, reasons, groups, notes: of the report, reasons of modules that are PEFT's.
        served, left: of its counts, summed over the modules.
        told: warnings of packlora.
        text: the report as it is printed at the end.
        error: the traceback, where it raised.
    """

    worst: float = float("inf")
    where: str = ""
    trained: int = 0
    accelerated: int = 0
    modules: int = 0
    served: int = 0
    left: dict[str, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    groups: int = 0
    notes: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    text: str = ""
    error: str = ""


def difference(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest, and of what."""
    if alone := got.keys() ^ want.keys():
        return float("inf"), f"only one has {sorted(alone)[:3]}"
    worst, where = 0.0, ""
    for name, value in want.items():
        if got[name].shape != value.shape:
            return float("inf"), f"{name} is {list(got[name].shape)}, not {list(value.shape)}"
        if value.numel():
            off = float((got[name] - value).abs().max()) / max(1.0, float(value.abs().max()))
            if not off <= worst:  # NaN is the worst
                worst, where = off, name
    return worst, where


def answer(got: Life, want: Life) -> Answer:
    worst, where = difference(got.tensors, want.tensors)
    report, calls = got.report, got.report.served().values()
    left: Counter[str] = Counter()
    for one in calls:
        left.update(one.left)
    return Answer(
        worst, where, sum("grad of" in name for name in want.tensors), report.accelerated, len(report.modules),
        sum(one.served for one in calls), dict(left), sorted({m.reason for m in report.modules if m.reason}),
        len(report.groups), list(report.notes), got.told, str(report),
    )  # fmt: skip


def answers(rank: int, cases: Sequence[Case]) -> dict[str, Answer]:
    """By the name of the case."""
    plain: dict[Case, Life] = {}
    found = {}
    for case in cases:
        try:
            if case.plain not in plain:
                plain[case.plain] = life(rank, case.plain, False)
            found[str(case)] = answer(life(rank, case, True), plain[case.plain])
        except Exception:
            found[str(case)] = Answer(error=traceback.format_exc())
    return found
