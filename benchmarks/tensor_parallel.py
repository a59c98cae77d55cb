"""`benchmarks tensor-parallel`: decoder layers that are cut over the processes, frozen, with packlora's LoRA, with PEFT's.

    torchrun --nproc-per-node 2 -m benchmarks tensor-parallel --out tensor-parallel-h200.json

A run with another number of processes adds its rows to the file. What is sent is counted beside what is timed.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from benchmarks.model import LLAMA_8B, LLAMA_70B, TARGETS, TINY, build
from benchmarks.options import Options, Outcome, choose
from benchmarks.processes import alarm, everyone, measured_rows, messages, together
from benchmarks.processes import part_of as part_of
from benchmarks.results import text_table
from packlora.adapters.attach import attach
from packlora.adapters.linear import Attached
from packlora.adapters.sharded import ShardedLinear
from packlora.adapters.spec import peft_config, resolve
from packlora.base.liger import use_liger
from packlora.base.packing import prepare_model
from packlora.config import JobConfig
from packlora.data.dataset import JobData
from packlora.data.encode import Sample
from packlora.parallel.adapter import WholeGradient
from packlora.parallel.mesh import Mesh
from packlora.parallel.tensor import shard
from packlora.plans.timing import Contender, Work, paired
from packlora.runtime.collate import PackedBatch, PackedSample, collate
from packlora.runtime.job import Job, take_steps

RANK, DROPOUT = 16, 0.1
CONTENDERS = ["frozen", "packlora", "packlora_stepped", "peft_bf16"]
LAYERS = {"8B": 4, "70B": 2}
SHAPES = {"8B": LLAMA_8B, "70B": LLAMA_70B}
ROUNDS, QUICK_ROUNDS = 20, 8
MAIN = 4
"""Samples of the cases that are quoted."""
VOCABULARY = 512
"""Embedding and output layer take no part."""
PROTOCOL = (
    "Decoder layers ({layers}) of the shapes of Llama-3.1-8B and -70B and the last norm, random bfloat16 weights, cut over the "
    "processes by parallel.tensor.shard, prepared as for training; 4 or 1 samples of 2048 tokens in one packed row, plain or "
    "with tokens of their own between the layers (sp). Forward from hidden states and backward to them; NCCL on GPUs. frozen: "
    "no adapter. packlora: LoRA r 16, alpha 32, dropout 0.1 on all linear layers, attached as training does, float32, B not "
    "zero, gradients into its parameters; _stepped: and the job's optimizer step after every run, with its message, "
    "clipping and AdamW. peft_bf16: PEFT's bfloat16 LoRA over the slices of the same layers, its part of a row-parallel "
    "layer in the sum that the frozen layer needs, with the same attention and norms and no message of its own; "
    "transformers' own tensor parallelism is not measured. Contenders run in turn inside one loop, random order each "
    "round, the GPUs of all processes aligned and the L2 flushed before each run, CUDA events, medians, ratios within a "
    "round; wall_ms: rounds in which each run is waited for. messages: collectives of a forward and backward by this "
    "process, of packlora_stepped with the step's; sent: their bytes where messages go round in a ring. over_frozen_tp: "
    "packlora's largest ratio over shapes at 4 x 2048 tokens; extra_collectives_per_step, wire_of_base: those of "
    "packlora_stepped less those of frozen, and its bytes over frozen's, the largest there; _sp: of the sp cases, where a "
    "block's input is joined again in the backward. Figures are process 0's."
)


@dataclass(frozen=True, slots=True)
class Case:
    shape: str
    config: PreTrainedConfig
    samples: int
    length: int
    sequence: bool

    @property
    def label(self) -> str:
        return f"{self.shape} {self.samples}x{self.length} {'sp' if self.sequence else 'plain'}"


def cases(options: Options) -> list[Case]:
    """All cases, or the subset of `quick`; sizes of a toy on a CPU."""

    def config(values: dict[str, Any], layers: int) -> PreTrainedConfig:
        sizes = {**values, "num_hidden_layers": layers, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
        return LlamaConfig(**sizes, attn_implementation="sdpa", use_cache=False)

    if options.tiny:
        tiny = config(TINY, options.layers or 2)
        return [Case("tiny", tiny, MAIN, 16, sequence) for sequence in (False, True)]
    shapes = ["8B"] if options.quick else list(SHAPES)
    return [
        Case(shape, config(SHAPES[shape], options.layers or LAYERS[shape]), samples, 2048, sequence)
        for shape in shapes
        for samples in ((MAIN,) if options.quick else (MAIN, 1))
        for sequence in (False, True)
    ]


# --- contenders --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Inputs:
    """x, dy [1, T, D]: hidden states that want a gradient, and that of the last ones; the same on all processes."""

    case: Case
    batch: PackedBatch
    x: torch.Tensor
    dy: torch.Tensor
    mesh: Mesh

    @staticmethod
    def random(case: Case, device: torch.device, mesh: Mesh) -> Inputs:
        torch.manual_seed(0)
        batch = collate([PackedSample(0, sample, n, 0, 7) for n, sample in enumerate(samples_of(case))], device)
        shape = (1, case.samples * case.length, case.config.hidden_size)
        x, dy = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
        return Inputs(case, batch, x.requires_grad_(), dy, mesh)

    def forward(self, model: Any) -> torch.Tensor:
        """The last hidden states [1, T, D] of a causal model."""
        output = model.base_model(
            inputs_embeds=self.x, position_ids=self.batch.position_ids_T[None], use_cache=False,
            sample_lengths=self.batch.sample_lengths,
        )  # fmt: skip
        return output.last_hidden_state  # type: ignore[no-any-return]

    def clear(self) -> None:
        """Between runs."""
        self.x.grad = None


def samples_of(case: Case) -> list[Sample]:
    ids, is_label = np.zeros(case.length, np.int32), np.arange(case.length) > 0
    return [Sample(ids, is_label)] * case.samples


def cut_model(inputs: Inputs) -> Any:
    """The case's model, frozen and this process's slice of it, ready for packed samples."""
    model: Any = build(inputs.case.config, inputs.x.device, LlamaForCausalLM)
    shard(model, everyone(), inputs.case.sequence)
    prepare_model(model, gradient_checkpointing=False)
    use_liger(model, "auto")
    return model


def contender(name: str, inputs: Inputs, made: dict[str, Work]) -> Contender:
    """By name: one of CONTENDERS. Its work is left in `made`."""

    def make() -> Work:
        alarm()
        model = cut_model(inputs)
        works = {"packlora": packlora_work, "packlora_stepped": stepped_work, "peft_bf16": peft_work}
        work = works.get(name, frozen_work)(model, inputs)
        made[name] = together(work, inputs.mesh, inputs.x.device)
        return made[name]

    return Contender(name, make)


def frozen_work(model: Any, inputs: Inputs) -> Work:
    return Work(lambda: inputs.forward(model).backward(inputs.dy), inputs.clear)


def packlora_work(model: Any, inputs: Inputs) -> Work:
    job, attached = attached_job(model, inputs.case)
    return Work(lambda: run_attached(model, inputs, attached), lambda: _clear(job, inputs), _plans(attached))


def stepped_work(model: Any, inputs: Inputs) -> Work:
    job, attached = attached_job(model, inputs.case)
    no_loss = torch.zeros((), dtype=torch.float64, device=inputs.x.device)

    def step() -> None:
        run_attached(model, inputs, attached)
        job.collect(no_loss)
        if take_steps([job], lambda: None) == [None]:
            raise RuntimeError(f"the job failed: {job.failure}")

    return Work(step, lambda: _clear(job, inputs), _plans(attached))


def run_attached(model: Any, inputs: Inputs, attached: Attached) -> None:
    with attached.active(inputs.batch.owners):
        inputs.forward(model).backward(inputs.dy)


def attached_job(model: Any, case: Case) -> tuple[Job, Attached]:
    """A job whose adapter is on the model, with other values than the first ones."""
    adapter = {"r": RANK, "lora_alpha": 2 * RANK, "lora_dropout": DROPOUT, "target_modules": TARGETS}
    train = {"max_steps": 10**6, "global_batch_size": case.samples}
    tree = {"name": "job", "data": {"path": "random"}, "adapter": adapter, "train": train}
    config = JobConfig.model_validate(tree)
    spec = resolve(peft_config(config.adapter, "random", None), model, "job")
    attached, (made,) = attach(model, {"job": spec}, 0)
    with torch.no_grad():  # alike on all processes, in what all of them hold
        torch.manual_seed(1)
        made.flat.add_(torch.randn_like(made.flat), alpha=0.002)
    data = JobData("job", samples_of(case), config.train, 0)
    return Job(config, data, [], made, norm_of=WholeGradient(made, everyone()).norm), attached


def _clear(job: Job, inputs: Inputs) -> None:
    job.discard()
    inputs.clear()


def _plans(attached: Attached) -> str:
    return "; ".join(str(line) for chooser in attached.choosers for line in chooser.record())[:400]


def peft_work(model: Any, inputs: Inputs) -> Work:
    leaves: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    for path, module in list(model.named_modules()):
        if isinstance(module, ShardedLinear):
            plain = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            plain.weight = module.weight
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, plain)
            if module.shard.leave is not None:
                leaves[path] = module.shard.leave
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=DROPOUT, target_modules=TARGETS)
    with inputs.x.device:
        adapted: Any = get_peft_model(model, config, autocast_adapter_dtype=False).train()
    for path, leave in leaves.items():
        model.get_submodule(path).register_forward_hook(lambda _, args, y, leave=leave: leave(y))

    def step() -> None:
        inputs.forward(model).backward(inputs.dy)

    def clear() -> None:
        adapted.zero_grad(set_to_none=True)
        inputs.clear()

    step()  # what PEFT refuses, it refuses here, on all processes alike
    return Work(step, clear)


# --- measuring ---------------------------------------------------------------------------------------------------------


def measured_row(case: Case, names: list[str], options: Options, mesh: Mesh) -> dict[str, Any]:
    """A case's row of the results."""
    inputs = Inputs.random(case, options.device, mesh)
    rounds = 2 if options.tiny else QUICK_ROUNDS if options.quick else ROUNDS
    made: dict[str, Work] = {}
    contenders = [contender(name, inputs, made) for name in names]
    timings = paired(contenders, options.device, rounds=(rounds, rounds), wall=True)  # as many on every process
    own = {name: work for name, work in made.items() if not name.startswith("peft")}
    return {
        "case": f"{case.label} tp{mesh.size}", "processes": mesh.size, "shape": case.shape, "sequence": case.sequence,
        "samples": case.samples, "layers": case.config.num_hidden_layers, **timings.row(),
        "messages": messages(own),
    }  # fmt: skip


def run(options: Options, mesh: Mesh) -> Outcome:
    """Measure; the first process prints a line per case."""
    names, chosen = choose(options.only, CONTENDERS, [], cases(options))
    rows = measured_rows(chosen, lambda case: measured_row(case, names, options, mesh), options, mesh)
    layers = ", ".join(sorted({f"{row['layers']} of {row['shape']}" for row in rows}))
    return Outcome(PROTOCOL.format(layers=layers), rows, options.keys(summary(rows)), table(rows))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are quoted; None where one could not be measured."""
    out: dict[str, Any] = {}
    for sequence, tail in ((False, ""), (True, "_sp")):
        main = [row for row in rows if row["samples"] == MAIN and row["sequence"] == sequence]
        for size in sorted({row["processes"] for row in main}):
            own = [row["over_frozen"].get("packlora") for row in main if row["processes"] == size]
            out[f"over_frozen_tp{size}{tail}"] = None if None in own else max(own)
        sent = [row["messages"] for row in main if {"frozen", "packlora_stepped"} <= row["messages"].keys()]
        more = [own["packlora_stepped"]["collectives"] - own["frozen"]["collectives"] for own in sent]
        wire = [own["packlora_stepped"]["sent"] / own["frozen"]["sent"] for own in sent]
        out[f"extra_collectives_per_step{tail}"] = max(more, default=None)
        out[f"wire_of_base{tail}"] = max(wire, default=None)
    for row in rows:
        kind = f"tp{row['processes']}_{row['shape']}_{row['samples']}" + ("_sp" if row["sequence"] else "")
        for name, ratio in row["over_frozen"].items():
            out[f"{name}_over_frozen_{kind}"] = ratio
    return out


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        for name in row["ms"]:
            wall, sent = row.get("wall_ms", {}).get(name), row["messages"].get(name)
            lines.append(
                [
                    row["case"], name, f"{row['ms'][name]:.2f}", f"{row['over_frozen'].get(name) or 1.0:.3f}",
                    "-" if wall is None else f"{wall:.2f}",
                    "-" if sent is None else str(sent["collectives"]),
                    "-" if sent is None else f"{sent['sent'] / 2**20:.1f}",
                ]
            )  # fmt: skip
    return text_table(["case", "contender", "ms", "/frozen", "wall ms", "messages", "MiB sent"], lines)
