"""Jobs in training on a base model that is sharded over ranks, and on a replica of it, for tests that run on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from packed import PackedSample, parts
from peft import LoraConfig

from packlora.adapters.attach import attach
from packlora.adapters.spec import resolve
from packlora.base.model import Base, load_base
from packlora.config import Run
from packlora.data.encode import Sample
from packlora.engine.parts import Part
from packlora.engine.passes import SingleDevice, run_microbatch
from packlora.ops.recompute_hooks import add_recompute
from packlora.ops.row_norm import row_norm
from packlora.parallel.sharded import Shards, load_sharded
from packlora.plans.ask import Ask
from packlora.plans.select import PlanChooser

STEPS = 3


@dataclass(frozen=True)
class Case:
    """What is trained. kind: of the first adapter; with three the others are a LoRA of some layers and a DoRA."""

    kind: str = "lora"
    dropout: float = 0.0
    bias: bool = False
    adapters: int = 1
    checkpointing: bool = False
    dtype: str = "float32"
    recompute: bool = False
    """Norms and products are computed again in the backward, as on a GPU."""
    targets: tuple[str, ...] = ()
    """Of the first adapter; all linear layers where there are none."""
    liger: bool | str = "auto"
    plan: str = "measured"
    """Of another one than the plain chain DoRA's norms are computed by kernels, too."""

    def configs(self) -> list[dict[str, Any]]:
        first = {"r": 4, "use_dora": self.kind == "dora", "use_rslora": self.kind == "rslora"}
        first |= {"lora_dropout": self.dropout, "bias": "lora_only" if self.bias else "none"}
        first |= {"target_modules": list(self.targets) or "all-linear"}
        others = [
            {"r": 3, "target_modules": ["v_proj", "o_proj", "down_proj"], "lora_dropout": self.dropout / 2},
            {
                "r": 2,
                "use_dora": True,
                "target_modules": ["q_proj", "v_proj", "up_proj"],
                "layers_to_transform": [1, 2],
            },
        ]
        return [first, *others][: self.adapters]


def base_of(folder: str, case: Case, sharded: bool) -> Base:
    run = Run(
        base_model=folder, dtype=case.dtype, device="cpu", output_dir="unused", max_tokens_per_microbatch=512,
        gradient_checkpointing=case.checkpointing, liger=case.liger, jobs=[{"name": "a", "data": {"path": "unused"}}],
    )  # fmt: skip
    return load_sharded(run, None, {"a": 60}) if sharded else load_base(run, None, {"a": 60})


class Training:
    """Jobs on a base model, on one rank. Gradients are summed over the ranks before every step."""

    def __init__(
        self, base: Base, configs: Sequence[dict[str, Any]], recompute: bool = False, plan: str = "measured"
    ) -> None:
        model = base.model
        specs = {}
        for number, config in enumerate(configs):
            peft = LoraConfig(**{"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | config)
            specs[f"job {number}"] = resolve(peft, model, f"job {number}").with_base_dropped(number == 0)
        self.attached, self.adapters = attach(model, specs, 5, PlanChooser(base.device, ask=Ask(plan)), base.storage)
        if recompute:
            add_recompute(model, base.storage.each)
        self.executor = SingleDevice(base, self.attached)
        self.storage, self.configs = base.storage, configs
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) / 16
                parameter.add_(noise.to(parameter))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for adapter in self.adapters for parameter in adapter.named_parameters().values()]

    def samples(self, rank: int, number: int) -> list[Part]:
        """Those of a microbatch, others on each rank. The last adapter has none in every other one."""
        generator = np.random.default_rng(100 * rank + number)
        owners = [owner for owner in range(len(self.adapters)) if owner == 0 or (owner + number + rank) % 2 == 0]
        packed = []
        for owner in owners:
            for index in range(int(generator.integers(1, 3))):
                length = int(generator.integers(9, 40))
                sample = Sample(generator.integers(3, 300, length).astype(np.int32), np.arange(length) > 2)
                key = 11 + owner if self.configs[owner].get("lora_dropout") else None
                packed.append(PackedSample(owner, sample, index, number, key))
        return parts(packed, np.full(len(self.adapters), 0.01))

    def microbatch(self, rank: int, number: int) -> torch.Tensor:
        """Losses of a microbatch whose gradients are added up."""
        return torch.stack([*run_microbatch(self.executor, self.samples(rank, number)).sums.values()])

    def step(self) -> list[torch.Tensor]:
        """The gradients of this rank, which are then summed over the ranks for a step of all jobs."""
        own = self.parameters()
        found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in own]
        flat = torch.cat([grad.flatten() for grad in found])
        dist.all_reduce(flat)
        for parameter, grad in zip(own, flat.split([p.numel() for p in own]), strict=True):
            parameter.grad = grad.view_as(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found

    def train(self, rank: int, steps: int = STEPS) -> list[torch.Tensor]:
        """All losses, gradients and parameters. Every step is two waves; in the second one rank has no microbatch, in training
        and in the evaluation after it."""
        seen: list[torch.Tensor] = []
        for step in range(steps):
            seen.append(self.microbatch(rank, 2 * step))
            if step % dist.get_world_size() == rank:
                self.keep_step(backward=True)
                self.keep_step(backward=False)
            else:
                seen.append(self.microbatch(rank, 2 * step + 1))
                seen += self.executor.evaluate(self.samples(rank, 50 + step)).sums.values()
            seen += self.step()
        return [*seen, *(parameter.detach().clone() for parameter in self.parameters())]

    def keep_step(self, backward: bool) -> None:
        if isinstance(self.storage, Shards):
            self.storage.idle(self.attached, backward)


def difference(rank: int, folder: str, case: Case, steps: int = STEPS) -> tuple[int, float]:
    """Of a training on the sharded model to one on a replica: how many tensors differ, and the largest difference."""
    pair = []
    with mock.patch.object(row_norm, "KERNELS_ON_CPU", case.plan != "measured"):
        for sharded in (False, True):
            base = base_of(folder, case, sharded)
            pair.append(Training(base, case.configs(), case.recompute, case.plan).train(rank, steps))
    unequal = [float((a - b).abs().max()) for a, b in zip(*pair, strict=True) if not torch.equal(a, b)]
    assert all(bool(tensor.any()) for tensor in pair[0][:1]), "there are losses"
    return len(unequal), max(unequal, default=0.0)


__all__ = ["STEPS", "Case", "Training", "base_of", "difference", "replace"]
