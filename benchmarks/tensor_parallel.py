"""`tensor-parallel`: decoder layers that are cut over the processes, frozen, with packlora's LoRA, with PEFT's.

    torchrun --nproc-per-node 2 -m benchmarks tensor-parallel --out tensor-parallel-h200.json

What is sent is counted beside what is timed. Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from peft import get_peft_model

from benchmarks.harness import Benchmark, Case, Options, Row, case, timed
from benchmarks.processes import aligned, everyone, messages
from benchmarks.shapes import SHORT, build, config_of
from benchmarks.training import ShortJob, lora, samples_of
from packlora.adapters.attach import attach
from packlora.adapters.linear import Attached
from packlora.adapters.sharded import ShardedLinear
from packlora.adapters.spec import resolve
from packlora.base.liger import use_liger
from packlora.base.model import Base
from packlora.base.packing import prepare_model
from packlora.config import JobConfig
from packlora.config.peft import peft_config
from packlora.data.dataset import JobData
from packlora.engine.collate import PackedBatch, collate
from packlora.engine.parts import Part
from packlora.engine.passes import SingleDevice
from packlora.engine.recorded import Body, Gradients, Recorder, Room, Shape
from packlora.engine.rows import Row as SampleRow
from packlora.parallel.adapter import WholeGradient
from packlora.parallel.cut import Slices
from packlora.parallel.tensor import shard
from packlora.runtime.cuda_graphs import buffers_of
from packlora.runtime.job import Job
from packlora.tune.timing import Work

RANK = 16
LAYERS = {"8B": 4, "70B": 2}
ROUNDS = {False: 20, True: 8}
"""Rounds, which must be as many on every process; of --quick."""
MAIN = 4
"""Samples of the cases that are quoted."""
RECORDED = "_recorded"
"""In the names of contenders that are CUDA graphs, which a CPU does not have."""
COUNTED = ("frozen", "packlora", "packlora_stepped")
"""Contenders whose messages are counted."""


def cases(options: Options) -> list[Case]:
    size = options.mesh.size
    return [
        case(
            f"{shape} {samples}x2048 {'sp' if sequence else 'plain'} tp{size}", shape=shape, samples=samples, sequence=sequence,
            processes=size,
        )
        for shape in (("8B",) if options.quick else LAYERS)
        for samples in ((MAIN,) if options.quick else (MAIN, 1))
        for sequence in (False, True)
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inputs:
    """x, dy [1, T, D]: hidden states that want a gradient, and that of the last ones; the same on all processes."""

    batch: PackedBatch
    x: torch.Tensor
    dy: torch.Tensor

    def forward(self, model: Any) -> torch.Tensor:
        """The last hidden states [1, T, D] of a causal model."""
        output = model.base_model(
            inputs_embeds=self.x, position_ids=self.batch.position_ids_T[None], use_cache=False,
            sample_lengths=self.batch.sample_lengths,
        )  # fmt: skip
        return output.last_hidden_state  # type: ignore[no-any-return]

    def clear(self) -> None:
        self.x.grad = None


def cut_work(name: str, one: Case, config: Any, inputs: Inputs, length: int) -> Work:
    """A contender on this process's slice of the model, prepared for packed samples as training does."""
    model: Any = build(config, inputs.x.device)
    shard(model, everyone(), one.sequence, vocabulary=False)
    prepare_model(model, gradient_checkpointing=False)
    use_liger(model, "auto")
    if name == "frozen":
        return Work(lambda: inputs.forward(model).backward(inputs.dy), inputs.clear)
    if name == "peft_bf16":
        return peft_work(model, inputs)
    if name == "frozen" + RECORDED:
        run = recorded(model, attach(model, {}, 0)[0], None, inputs)
        return Work(run, lambda: None)
    job, attached = attached_job(model, one.samples, length)

    def eager() -> None:
        with attached.active(inputs.batch.owners):
            inputs.forward(model).backward(inputs.dy)

    run = recorded(model, attached, job, inputs) if RECORDED in name else eager

    def clear() -> None:
        job.discard()
        inputs.clear()

    step = partial(stepped, run, job) if name.endswith("_stepped") else run
    return Work(step, clear, "; ".join(str(line) for chooser in attached.choosers for line in chooser.record())[:400])


def stepped(run: Callable[[], None], job: Job) -> None:
    """A forward and a backward, and the job's optimizer step."""
    run()
    job.state.collect(torch.zeros(1, dtype=torch.float64, device=job.adapter.flat.device))
    _, norm, *_ = job.state.step(job.lr_at(0)).tolist()
    if not math.isfinite(norm):
        raise RuntimeError(f"gradient norm {norm:g}")
    job.state.accept()
    job.state.discard()


class ToFirst(Body):
    """A Body whose backward goes on to the first layer's input, as that of the other contenders does."""

    first: list[torch.Tensor]

    def _run_backward(self) -> tuple[torch.Tensor | None, ...]:
        with self._attached.active(self._owners):
            wanted = [*self.gradients.parameters, *self.first]
            return torch.autograd.grad(self._trained(), wanted, self._d, allow_unused=True)[:-1]


def recorded(model: Any, attached: Attached, job: Job | None, inputs: Inputs) -> Callable[[], None]:
    """Forward and backward as the two CUDA graphs that training has of a microbatch, messages included. The function that
    replays them holds what they read.

    Args:
        job: None: the model is frozen.
    """
    batch, device = inputs.batch, inputs.x.device
    single = SingleDevice(Base(model, None, device, "random", [], storage=Slices(can_record=True)), attached)
    buffers = {} if job is None else buffers_of([job.state])
    dropout, shape = job is not None and job.dropout_key is not None, Shape.of(batch.sample_lengths, 0)
    body = ToFirst(single, shape, tuple(buffers), dropout, Gradients(buffers), Room())
    body.first = first_hidden(model)

    def run() -> None:
        body.forward()
        body.backward([inputs.dy[0]])
        if job is not None:
            job.state.added = body.reached[job.adapter.number]

    assert shape.tokens == len(batch.input_ids_T), "the microbatch would be padded"
    body.load(batch)
    for _ in range(3):  # messages and kernels have run before they are recorded
        run()
    if job is not None:
        job.discard()
    body.record(Recorder(device))
    return run


def first_hidden(model: Any) -> list[torch.Tensor]:
    """The embeddings' newest output, as a leaf that wants a gradient."""
    made: list[torch.Tensor] = []

    def leaf(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        made[:] = [output.detach().requires_grad_()]
        return made[0]

    model.get_input_embeddings().register_forward_hook(leaf)
    return made


def attached_job(model: Any, samples: int, length: int) -> tuple[Job, Attached]:
    """A job whose adapter is on the model, with other values than the first ones."""
    short = ShortJob("job", RANK, samples, samples_of(np.full(samples, length), 512, 0))
    config = JobConfig.model_validate(short.tree(10**6))
    attached, (made,) = attach(model, {"job": resolve(peft_config(config.adapter, "random", None), model, "job")}, 0)
    with torch.no_grad():  # alike on all processes, in what all of them hold
        torch.manual_seed(1)
        made.flat.add_(torch.randn_like(made.flat), alpha=0.002)
    data = JobData("job", short.samples, config.train, 0)
    job = Job(config, data, [], made)
    job.state.norm_of = WholeGradient(made, everyone()).norm
    return job, attached


def peft_work(model: Any, inputs: Inputs) -> Work:
    """PEFT over the slices; its part of a row-parallel layer is in the sum that the frozen layer needs."""
    leaves: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    for path, module in list(model.named_modules()):
        if isinstance(module, ShardedLinear):
            plain = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            plain.weight = module.weight
            model.set_submodule(path, plain)
            if module.shard.leave is not None:
                leaves[path] = module.shard.leave
    with inputs.x.device:
        adapted: Any = get_peft_model(model, lora(RANK, task_type=None), autocast_adapter_dtype=False).train()
    for path, leave in leaves.items():
        model.get_submodule(path).register_forward_hook(lambda _, args, y, leave=leave: leave(y))

    def clear() -> None:
        adapted.zero_grad(set_to_none=True)
        inputs.clear()

    def step() -> None:
        inputs.forward(model).backward(inputs.dy)

    step()  # what PEFT refuses, it refuses here, on all processes alike
    return Work(step, clear)


def can_record(device: torch.device) -> bool:
    """Whether a device has CUDA graphs."""
    return device.type == "cuda"


def measure(one: Case, names: list[str], options: Options) -> Row:
    tiny, device = options.tiny, options.device
    length, layers = 64 if tiny else 2048, options.layers or (2 if tiny else LAYERS[one.shape])
    config = config_of(SHORT[one.shape], tiny, layers, vocab_size=512)  # embedding and output layer take no part
    torch.manual_seed(0)
    samples = samples_of(np.full(one.samples, length), 512, 0)
    batch = collate([Part(0, [SampleRow(sample, (7, 0, n)) for n, sample in enumerate(samples)])], device)
    x, dy = (torch.randn(1, one.samples * length, config.hidden_size, device=device).bfloat16() for _ in range(2))
    inputs, made = Inputs(batch, x.requires_grad_(), dy), dict[str, Work]()
    names = [name for name in names if RECORDED not in name or can_record(device)]
    contenders = [
        aligned(name, partial(cut_work, name, one, config, inputs, length), options.mesh, device, made)
        for name in names
    ]
    row = timed(contenders, options, rounds=(ROUNDS[options.quick],) * 2, wall=True)
    sent = messages({name: work for name, work in made.items() if name in COUNTED})
    return {"layers": layers, **row, "recorded_over_frozen": recorded_ratios(row["ms"]), "messages": sent}


def recorded_ratios(ms: dict[str, float]) -> Row:
    """Ratios of packlora's medians to the frozen layers', where both are graphs; by packlora's name without the word."""
    below = ms.get("frozen" + RECORDED)
    own = {name: time for name, time in ms.items() if name.startswith("packlora") and RECORDED in name}
    return {} if below is None else {name.replace(RECORDED, ""): time / below for name, time in own.items()}


def summary(rows: list[Row]) -> Row:
    """The worst of the quoted cases; every ratio by processes, shape and samples; _sp: with sequence parallelism."""
    out: Row = {}
    for sequence, tail in ((False, ""), (True, "_sp")):
        own = [row for row in rows if row["sequence"] == sequence]
        main = [row for row in own if row["samples"] == MAIN]
        for size in sorted({row["processes"] for row in main}):
            for samples, end in ((MAIN, ""), (1, "_1x2048")):
                found = [row for row in own if (row["processes"], row["samples"]) == (size, samples)]
                ratios = [row["over_frozen"].get("packlora") for row in found]
                if ratios:
                    out[f"over_frozen_tp{size}{end}{tail}"] = None if None in ratios else max(ratios)
        sent = [row["messages"] for row in main if {"frozen", "packlora_stepped"} <= row["messages"].keys()]
        more = [one["packlora_stepped"]["collectives"] - one["frozen"]["collectives"] for one in sent]
        wire = [one["packlora_stepped"]["sent"] / one["frozen"]["sent"] for one in sent]
        out[f"extra_collectives_per_step{tail}"], out[f"wire_of_base{tail}"] = (
            max(more, default=None),
            max(wire, default=None),
        )
    for row in rows:
        kind = f"tp{row['processes']}_{row['shape']}_{row['samples']}" + "_sp" * row["sequence"]
        eager = {name: ratio for name, ratio in row["over_frozen"].items() if RECORDED not in name}
        graphs = row.get("recorded_over_frozen", {})
        out |= {f"{name}_over_frozen_{kind}": ratio for name, ratio in eager.items()}
        out |= {f"{name}_recorded_over_frozen_{kind}": ratio for name, ratio in graphs.items()}
    return out


TENSOR_PARALLEL = Benchmark(
    cases, measure, summary,
    "Decoder layers (4 of 8B, 2 of 70B) of the shapes of Llama-3.1-8B and -70B and the last norm, random bfloat16 "
    "weights, cut over the processes by parallel.tensor.shard, prepared as for training; 4 or 1 samples of 2048 "
    "tokens in one packed row, plain or with tokens of their own between the layers (sp). Forward from hidden "
    "states and backward to them; NCCL on GPUs. frozen: no adapter. packlora: LoRA r 16, alpha 32, dropout 0.1 on "
    "all linear layers, attached as training does, float32, B not zero; _stepped: and the job's optimizer step "
    "after every run, with its message, clipping and AdamW. peft_bf16: PEFT's bfloat16 LoRA over the slices of the "
    "same layers, its part of a row-parallel layer in the sum that the frozen layer needs, with the same attention "
    "and norms and no message of its own; transformers' own tensor parallelism is not measured. Contenders run in "
    "turn inside one loop, random order each round, the GPUs of all processes aligned and the L2 flushed before "
    "each run, CUDA events, medians, ratios within a round; wall_ms: rounds in which each run is waited for. _recorded: "
    "forward and backward as the two CUDA graphs that training has of a microbatch, messages included, from token ids "
    "with a gradient of the first layer's input; recorded_over_frozen: packlora's medians so over the frozen layers'. "
    "messages: collectives of a forward and backward by this process, of packlora_stepped with the step's; sent: "
    "their bytes where messages go round in a ring. over_frozen_tp: packlora's largest ratio over shapes at 4 x "
    "2048 tokens; extra_collectives_per_step, wire_of_base: those of packlora_stepped less those of frozen, and its "
    "bytes over frozen's, the largest there; _sp: of the sp cases. Figures are process 0's.",
    [
        "frozen", "packlora", "packlora_stepped", "peft_bf16", "frozen_recorded", "packlora_recorded",
        "packlora_recorded_stepped",
    ],
    by_case=True, where="processes",
)  # fmt: skip
