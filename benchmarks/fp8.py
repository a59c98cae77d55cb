"""`fp8`: what products in FP8 cost in accuracy on SmolLM2-135M, beside NF4 and beside what the order of sums alone makes of
bfloat16."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cosine_similarity

import packlora
from benchmarks.harness import Benchmark, Case, Options, Row, case
from benchmarks.models import apart
from benchmarks.quality import HELD_OUT, LENGTH, LR, one_step, real_model, source_rows
from packlora.codes.load import dequantised
from packlora.config import QuantizationConfig
from packlora.fp8.peft import CodedWeight
from packlora.live.layers import LayerForward
from packlora.live.report import Report

TRAINED, REPORTED, SAMPLES = 500, 50, 4
WAYS = ("bf16", "bf16_reversed", "fp8", "nf4")
"""bf16_reversed: with the samples of each batch in reverse order, which changes the order of sums alone."""


def fp8_cases(options: Options) -> list[Case]:
    return [case(f"seed {seed}", seed=seed) for seed in range(1 if options.quick else 2)]


def adapted(base: Any, way: str, device: torch.device) -> tuple[Any, Report]:
    """LoRA r 16 on all linear layers, by packlora.accelerate, over a base as the way has it; and its report."""
    own = copy.deepcopy(base).to(device)
    if way == "nf4":
        for path, layer in own.named_modules():
            if type(layer) is torch.nn.Linear and "lm_head" not in path:
                made = dequantised(layer.weight.data, QuantizationConfig(method="nf4"), layer.weight.dtype)
                layer.weight.data = made.to(layer.weight.dtype)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(own, config).train()
    return model, packlora.accelerate(model, compute="fp8" if way == "fp8" else "dtype")


def layers_in_fp8(model: Any, report: Report) -> int:
    """Number of layers that have FP8 codes of their base weight and of which PEFT has computed no call.

    Raises:
        RuntimeError: none, though FP8 is asked for; whatever is measured then is bfloat16.
    """
    forwards = [own for own in (layer.__dict__.get("_packlora") for layer in model.modules()) if own is not None]
    calls = report.served()
    count = sum(
        isinstance(own, LayerForward)
        and isinstance(getattr(own.ready(), "stored", None), CodedWeight)
        and calls[own.path].served > 0
        and not calls[own.path].left
        for own in forwards
    )
    if not count:
        raise RuntimeError(f"no layer has computed in FP8: {report}")
    return count


def measure_fp8(one: Case, names: list[str], options: Options) -> Iterator[Row]:
    """A step of each way in turn, from the same initial adapter on the same samples; before them logits and gradients. The row
    grows every REPORTED steps."""
    steps = 2 if options.quick else TRAINED
    rows = options.shared(
        "rows", lambda: torch.tensor(source_rows(HELD_OUT + (16 if options.quick else steps * SAMPLES)))
    )
    rows = rows.to(options.device)
    order = HELD_OUT + torch.randperm(len(rows) - HELD_OUT, generator=torch.Generator().manual_seed(one.seed))
    base, ways, reports = real_model(), dict[str, tuple[Any, list[Any], Any]](), dict[str, Report]()
    for parameter in base.parameters():
        parameter.data = parameter.data.bfloat16()
    for name in names:
        torch.manual_seed(one.seed)
        model, reports[name] = adapted(base, name, options.device)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        ways[name] = model, parameters, torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
    row = at_first(base, ways, rows[: 2 if options.quick else 8])
    if "fp8" in ways:
        row["fp8_layers"], row["layers"] = layers_in_fp8(ways["fp8"][0], reports["fp8"]), len(reports["fp8"].modules)
    losses: dict[str, list[float]] = {name: [] for name in names}
    began = time.monotonic()
    for step in range(steps):
        if step and step % REPORTED == 0:
            print(f"{one.label}: {step} steps, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            yield row | compared(losses) | {"unfinished": list(names)}
        ids = rows[order[(torch.arange(SAMPLES) + step * SAMPLES) % len(order)].to(rows.device)]
        for name, (model, parameters, optimizer) in ways.items():
            batch = ids.flip(0) if name == "bf16_reversed" else ids
            with torch.autocast(options.device.type, torch.bfloat16):
                losses[name].append(one_step(model, parameters, optimizer, {"input_ids": batch, "labels": batch}))
    row |= compared(losses)
    with torch.no_grad(), torch.autocast(options.device.type, torch.bfloat16):
        for name, (model, _, _) in ways.items():
            held = rows[:HELD_OUT]
            row[f"eval_{name}"] = float(model(input_ids=held, labels=held).loss)
    if "fp8" in ways:
        row["fp8_layers"] = layers_in_fp8(ways["fp8"][0], reports["fp8"])
    yield row


def compared(losses: dict[str, list[float]]) -> Row:
    """Losses of the steps so far, and how far those of each way are from bf16's."""
    row: Row = {"steps": len(losses["bf16"]), **{f"losses_{name}": list(own) for name, own in losses.items()}}
    for name, own in losses.items():
        row[f"mean_abs_{name}"] = apart(own, losses["bf16"])
        row[f"mean_{name}"] = sum(a - b for a, b in zip(own, losses["bf16"], strict=True)) / len(own)
        row[f"last_{name}"] = sum(own[-REPORTED:]) / len(own[-REPORTED:])
    return row


def at_first(base: Any, ways: dict[str, tuple[Any, list[Any], Any]], ids: torch.Tensor) -> Row:
    """Logits against the base's own in float64, as the relative error of all and the least cosine of a token; and the cosine of
    the gradient of all adapters with that of bf16, B drawn anew."""
    exact_model = copy.deepcopy(base).double().to(ids.device)
    with torch.no_grad():
        exact = exact_model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    del exact_model
    out, gradients = dict[str, Any](), dict[str, torch.Tensor]()
    for name, (model, parameters, _) in ways.items():
        kept = [parameter.detach().clone() for parameter in parameters]
        with torch.autocast(ids.device.type, torch.bfloat16):
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1).double()
                torch.manual_seed(0)
                for own, parameter in model.named_parameters():
                    if "lora_B" in own:
                        parameter.normal_(std=0.02)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients[name] = torch.cat([parameter.grad.flatten() for parameter in parameters])
        model.zero_grad()
        with torch.no_grad():
            for parameter, before in zip(parameters, kept, strict=True):
                parameter.copy_(before)
        out[f"logits_error_{name}"] = float((logits - exact).norm() / exact.norm())
        out[f"logits_cosine_min_{name}"] = float(cosine_similarity(logits, exact, dim=1).min())
    for name, own in gradients.items():
        out[f"gradient_cosine_{name}"] = float(cosine_similarity(own.double(), gradients["bf16"].double(), dim=0))
    return out


def fp8_summary(rows: list[Row]) -> Row:
    """Means over the seeds that have all steps; over_noise: mean |loss - bf16's| over that of the two runs of bf16."""
    rows = [row for row in rows if not row.get("unfinished")]
    keys = [key for key, value in rows[0].items() if isinstance(value, float)] if rows else []
    out: Row = {key: sum(row[key] for row in rows) / len(rows) for key in keys}
    if out.get("mean_abs_bf16_reversed"):
        out |= {
            f"{name}_over_noise": out[f"mean_abs_{name}"] / out["mean_abs_bf16_reversed"] for name in ("fp8", "nf4")
        }
    return out


FP8 = Benchmark(
    fp8_cases, measure_fp8, fp8_summary,
    "SmolLM2-135M-Instruct; LoRA r 16, alpha 32 on all linear layers by packlora.accelerate, no dropout; bfloat16 "
    f"base, float32 adapters under torch.autocast; AdamW, lr {LR}, clipping at 1, {TRAINED} steps of {SAMPLES} "
    f"samples of the source of Python's standard library ({LENGTH} tokens each), order drawn by seed. Four runs per seed of "
    "one loop from the same initial adapter, a step of each in turn: bf16; bf16_reversed, with the samples of each batch in "
    "reverse order; fp8, compute='fp8'; nf4, over weights that were quantised to NF4 and back. mean_abs: of the difference "
    "of losses to bf16's per step; mean: with its sign; last: mean loss of the last "
    f"{REPORTED} steps; eval: mean loss on {HELD_OUT} held-out samples at the end. logits: of the base before training "
    "against itself in float64; gradient_cosine: of all adapters' gradients with bf16's, B normal with deviation 0.02. "
    "fp8_layers: of the layers with adapters, those whose base products were in FP8 in all calls.",
    list(WAYS), where="any",
)  # fmt: skip
