"""`benchmarks experts` under torchrun: a model whose experts are shared out to the processes, frozen and with adapters.

    torchrun --nproc-per-node 2 -m benchmarks experts --out experts-ep-h200.json

Shapes, cases and contenders are those of experts.py. A run with another number of processes adds its rows to the file. What is
sent is counted beside what is timed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeForCausalLM

from benchmarks import experts
from benchmarks.experts import SAMPLES, Case, cases
from benchmarks.model import build
from benchmarks.options import Options, Outcome, choose
from benchmarks.processes import alarm, everyone, measured_rows, messages, together
from benchmarks.processes import message_table as table
from benchmarks.processes import part_of as part_of
from packlora.parallel.experts import shard_experts
from packlora.parallel.mesh import Mesh
from packlora.plans.timing import Contender, Work, paired

LABEL = "experts-ep"
CONTENDERS = ["frozen", "packlora"]
ROUNDS, QUICK_ROUNDS = 20, 8
PROTOCOL = (
    "As `python -m benchmarks experts`, with the experts of {layers} layers shared out to the processes by "
    "parallel.experts.shard_experts; each has all else and the same tokens. frozen: no adapter. packlora: LoRA or DoRA of one "
    "job or four, without optimizer steps. Contenders run in turn inside one loop, random order each round, the GPUs of all "
    "processes aligned before each run, CUDA events, medians, ratios within a round. messages: collectives of a forward and "
    "backward by this process, and sent: their bytes where messages go round in a ring. Figures are process 0's."
)


def contender(
    name: str, base: nn.Module, ids_BS: torch.Tensor, case: Case, mesh: Mesh, made: dict[str, Work]
) -> Contender:
    """One of CONTENDERS, by experts.py. Its work is left in `made`."""
    plain = experts.contender(name, base, ids_BS, case)

    def make() -> Work:
        alarm()
        torch.manual_seed(1)  # adapters and gradients are alike on all processes
        made[name] = together(plain.make(), mesh, ids_BS.device)
        return made[name]

    return Contender(name, make)


def measured_row(case: Case, names: list[str], options: Options, mesh: Mesh) -> dict[str, Any]:
    """A case's row of the results."""
    torch.manual_seed(0)  # so all processes have the same model
    base = build(case.config, options.device, Qwen3MoeForCausalLM)
    base.lm_head = nn.Identity()
    shard_experts(base, everyone())
    ids_BS = torch.randint(0, case.config.vocab_size, (SAMPLES, case.length), device=options.device)
    rounds = 2 if options.tiny else QUICK_ROUNDS if options.quick else ROUNDS
    made: dict[str, Work] = {}
    contenders = [contender(name, base, ids_BS, case, mesh, made) for name in names]
    timings = paired(contenders, options.device, rounds=(rounds, rounds))  # as many on every process
    return {
        "case": f"{case.label} ep{mesh.size}", "processes": mesh.size, "jobs": case.jobs, "dora": case.dora,
        "T": ids_BS.numel(), "layers": case.config.num_hidden_layers, **timings.row(), "messages": messages(made),
    }  # fmt: skip


def run(options: Options, mesh: Mesh) -> Outcome:
    """Measure; the first process prints a line per case."""
    names, chosen = choose(options.only, CONTENDERS, [], cases(options))
    rows = measured_rows(chosen, lambda case: measured_row(case, names, options, mesh), options, mesh)
    layers = ", ".join(sorted({str(row["layers"]) for row in rows}))
    return Outcome(PROTOCOL.format(layers=layers), rows, options.keys(summary(rows)), table(rows))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """packlora's time over that of the frozen model, by kind, jobs, tokens and processes; None where it was not measured."""
    return {
        f"{'dora' if row['dora'] else 'lora'}_{row['jobs']}jobs_T{row['T']}_over_frozen_ep{row['processes']}": row[
            "over_frozen"
        ].get("packlora")
        for row in rows
    }
