"""`packlora plan`: what a run would do, found without training and without the model's weights.

Memory is an estimate from counts of what is kept: see `estimate_memory` for what it leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PretrainedConfig

from packlora.config import Run
from packlora.model import choose_device, load_skeleton
from packlora.prepare import Prepared, prepare
from packlora.schedule.pack import lower_bound, pack_round

ROUNDS_SHOWN = 2000
"""Rounds that are packed for the figures; a longer run is scaled up from its first rounds."""


@dataclass(frozen=True, slots=True)
class PackingFigures:
    """Microbatches of a run under one method. bound: fewest that the lengths allow, round by round."""

    microbatches: int
    bound: int
    tokens: int
    capacity: int

    @property
    def fill(self) -> float:
        """Share of the microbatches' capacity that tokens fill."""
        return self.tokens / (self.microbatches * self.capacity)


def count_microbatches(prepared: Prepared, method: str) -> PackingFigures:
    """Pack every round of the run (or the first ROUNDS_SHOWN, scaled up) and count."""
    rounds = max(job.data.num_steps for job in prepared.jobs)
    shown = min(rounds, ROUNDS_SHOWN)
    microbatches = bound = tokens = 0
    for number in range(shown):
        batches = {
            job.config.name: [(n, job.data.samples[n].num_tokens) for n in job.data.global_batch(number)]
            for job in prepared.jobs
            if number < job.data.num_steps
        }
        plan = pack_round(batches, prepared.budget, method)
        microbatches += len(plan)
        tokens += sum(microbatch.num_tokens for microbatch in plan)
        bound += lower_bound([length for batch in batches.values() for _, length in batch], prepared.budget)
    scale = rounds / shown
    return PackingFigures(round(microbatches * scale), round(bound * scale), round(tokens * scale), prepared.budget)


def estimate_memory(run: Run, prepared: Prepared, config: PretrainedConfig, trainable: int) -> dict[str, int]:
    """Bytes by what holds them, at the fullest microbatch.

    Counted: frozen weights; per trainable parameter its value, gradient, two AdamW moments and the last good value (4 bytes
    each); per token and layer the tensors that backward needs (or with checkpointing one per layer and one layer's worth);
    logits of the label tokens, their softmax and gradient. Not counted: temporary buffers, the allocator's rounding, the
    interpreter and its libraries (about 0.6 GiB of a CPU process).
    """
    width = getattr(torch, run.dtype).itemsize
    config = config.get_text_config()
    hidden, layers = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * hidden
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    # two norms keep input and float32 normalised copy, their outputs feed the projections; queries and keys before and
    # after rotation, values, repeated keys and values, attention output; gate, up, activation and their product
    per_layer = width * (4 * hidden + 3 * heads * head_dim + 2 * kv_heads * head_dim + 2 * heads * head_dim + 4 * inner)
    per_layer += 4 * 4 * hidden
    tokens = min(prepared.budget, max(sum(s.num_tokens for s in job.encoded.samples) for job in prepared.jobs))
    kept = layers * per_layer
    if run.gradient_checkpointing:
        kept = layers * hidden * width + per_layer
    labels = max(
        sum(s.num_labels for s in job.encoded.samples) / sum(s.num_tokens for s in job.encoded.samples)
        for job in prepared.jobs
    )
    return {
        "frozen weights": prepared.parameters * width,
        "adapters and optimizer": trainable * 4 * 5,
        "activations": tokens * kept,
        "logits": round(tokens * labels * config.vocab_size * (4 * 2 + width)),
    }


def print_plan(run: Run) -> None:
    """Check the run as training would, then print jobs, microbatches and memory."""
    prepared = prepare(run)
    skeleton = load_skeleton(run)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    table = Table(box=None, pad_edge=False, header_style="bold")
    headings = (
        "job",
        "adapter",
        "trainable",
        "samples",
        "mean",
        "p50",
        "p95",
        "max",
        "batch",
        "steps",
        "tokens",
        "labels",
    )
    for name in headings:
        table.add_column(name, justify="left" if name in ("job", "adapter") else "right")
    trainable = 0
    for job in prepared.jobs:
        lengths = np.array([sample.num_tokens for sample in job.encoded.samples])
        peft = job.spec.peft
        parameters = trainable_parameters(prepared, job.config.name, skeleton)
        trainable += parameters
        kind = "DoRA" if peft.use_dora else "rsLoRA" if peft.use_rslora else "LoRA"
        epochs = job.data.num_steps / job.data.batches_per_epoch
        labels = sum(sample.num_labels for sample in job.encoded.samples) / lengths.sum()
        table.add_row(
            Text(job.config.name), f"{kind} r {peft.r}", f"{parameters / 1e6:.2f} M", str(len(lengths)),
            f"{lengths.mean():.0f}", f"{np.percentile(lengths, 50):.0f}", f"{np.percentile(lengths, 95):.0f}",
            str(lengths.max()), str(job.config.train.global_batch_size), str(job.data.num_steps),
            f"{lengths.sum() * epochs:.0f}", f"{labels:.0%}",
        )  # fmt: skip
    console.print(table)
    console.print()
    chosen = "solo" if run.schedule.method == "solo" else "greedy"
    alone, used = count_microbatches(prepared, "solo"), count_microbatches(prepared, chosen)
    console.print(
        Text(
            f"microbatches of at most {prepared.budget} tokens: {used.microbatches} ({chosen}; lower bound {used.bound}, "
            f"{used.fill:.0%} full); each job by itself would need {alone.microbatches} ({alone.fill:.0%} full)"
        ),
        soft_wrap=True,
    )
    memory = estimate_memory(run, prepared, skeleton.config, trainable)
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in memory.items())
    device = choose_device(run.device)
    console.print(
        Text(f"memory on {device.type}, estimated: {sum(memory.values()) / 2**30:.2f} GiB ({parts})"), soft_wrap=True
    )
    for warning in prepared.warnings:
        console.print(Text(f"note: {warning}"), soft_wrap=True)


def trainable_parameters(prepared: Prepared, job: str, skeleton: torch.nn.Module) -> int:
    """Number of trainable parameters of a job's adapter."""
    spec = next(item.spec for item in prepared.jobs if item.config.name == job)
    total = 0
    for path, module in spec.modules.items():
        rows, cols = skeleton.get_submodule(path).weight.shape  # type: ignore[misc]
        total += module.rank * (rows + cols) + (rows if module.use_dora else 0) + (rows if module.train_bias else 0)
    return total
