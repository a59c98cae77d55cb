"""Jobs on a tiny model whose microbatches share shapes, by an executor with graphs and without; on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from conftest import TINY, tiny_model
from packed import PackedSample, parts
from peft import LoraConfig

from packlora.adapters.attach import attach
from packlora.adapters.embeddings import change_embeddings
from packlora.adapters.experts import ExpertWeights
from packlora.adapters.spec import resolve
from packlora.base.model import Base, prepare_model
from packlora.data.encode import Sample
from packlora.engine.graphs import GraphedDevice
from packlora.engine.objectives.neftune import Neftune, add_noise
from packlora.engine.parts import Part
from packlora.engine.passes import SingleDevice, run_microbatch
from packlora.engine.recorded import Recorder
from packlora.ops.attention import attention
from packlora.ops.attention.blocks import SampleBlocks
from packlora.ops.attention.by_sample import by_sample
from packlora.ops.lora_linear.plan import CHAIN, Plan
from packlora.ops.lora_linear.prepared import Prepared
from packlora.plans.select import PlanChooser

JOBS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "lora_dropout": 0.2},
    "dora": {"r": 3, "use_dora": True},
    "some modules": {"r": 20, "target_modules": ["q_proj", "v_proj", "up_proj"]},
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
BESIDE: dict[str, dict[str, Any]] = {
    "head": {"r": 3, "target_modules": ["lm_head"], "lora_dropout": 0.3},
    "dora head": {"r": 2, "target_modules": ["lm_head"], "use_dora": True},
    "dora head, dropped": {"r": 2, "target_modules": ["lm_head"], "use_dora": True, "lora_dropout": 0.3},
    "embedding": {"r": 3, "target_modules": ["embed_tokens"]},
    "dora embedding, head": {"r": 2, "target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    "copies": {"r": 2, "target_modules": ["lm_head"], "modules_to_save": ["embed_tokens", "norm", "input_layernorm"]},
    "copied head": {"r": 2, "target_modules": ["embed_tokens"], "modules_to_save": ["lm_head", "post_attention_layernorm"]},
    "copied linear": {"r": 2, "target_modules": ["embed_tokens"], "modules_to_save": ["down_proj"]},
    "tokens": {"r": 2, "target_modules": ["lm_head"], "trainable_token_indices": {"embed_tokens": [5, 9, 80]}},
    "tied tokens": {"r": 2, "target_modules": ["embed_tokens"], "modules_to_save": ["norm", "q_norm"]},
    "tokens of both": {"r": 2, "target_modules": ["v_proj"], "trainable_token_indices": [5, 9, 80]},
    "decoder": {"r": 3, "target_modules": ["q_proj", "down_proj"]},
    "decoder, head": {"r": 3, "target_modules": ["q_proj", "down_proj", "lm_head"], "use_dora": True},
    "experts": {"r": 2, "target_modules": [], "target_parameters": EXPERTS, "lora_dropout": 0.2},
    "dora experts, head": {"r": 3, "target_modules": ["lm_head"], "target_parameters": EXPERTS, "use_dora": True},
    "router": {"r": 2, "target_modules": ["o_proj"], "target_parameters": ["gate.weight"]},
}  # fmt: skip
"""Jobs that train output layers, embeddings, copies of modules, rows of tokens, and experts."""
MICROBATCHES = [
    [(0, 90), (0, 24), (1, 70), (2, 50)], [(0, 20), (1, 81), (2, 40), (2, 99)], [(2, 110), (2, 120)],
    [(1, 30), (1, 87), (2, 111)], [(0, 100), (0, 30), (1, 90), (2, 10)], [(0, 91), (0, 82)], [(0, 200), (1, 200), (2, 50)],
]  # fmt: skip
"""Owner and length of each sample: all but the last are of one shape."""
SCALES = np.array([0.01, 0.02, 0.03])
COLUMNS = {name: column.dtype for name, column in Neftune.columns.items()}


class Run:
    """Three jobs in training. graphs: by the executor with graphs, whose recorder that is."""

    def __init__(
        self, graphs: Callable[[torch.device], Any] | None, chooser: PlanChooser | None = None, device: str = "cpu",
        dtype: torch.dtype = torch.float32, layers: int = 1, jobs: tuple[str, ...] = ("lora", "dora", "some modules"),
        shrink: int = 1, balance: float = 0.0,
    ) -> None:  # fmt: skip
        """shrink: what lengths are divided by. balance: share of the second job's load-balancing loss, or of the only job's."""
        self.shrink, self.balance, self.dropped = shrink, balance, ["lora_dropout" in JOBS[name] for name in jobs]
        model = tiny_model("llama", num_hidden_layers=layers).to(device, dtype)
        prepare_model(model, False)
        configs = {
            name: LoraConfig(**{"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | JOBS[name]) for name in jobs
        }
        specs = {name: resolve(config, model, name) for name, config in configs.items()}
        attached, self.adapters = attach(model, specs, 0, chooser)
        change_embeddings(model, attached, add_noise)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) / 16
                parameter.add_(noise.to(parameter))
        self.optimizers = [torch.optim.AdamW(a.named_parameters().values(), lr=1e-2) for a in self.adapters]
        single = SingleDevice(Base(model, Any, torch.device(device), "random", [], fused_loss=True), attached)
        self.told: list[str] = []
        self.executor: Any = single
        self.buffers = {
            adapter.number: {name: (p, torch.zeros_like(p)) for name, p in adapter.named_parameters().items()}
            for adapter in self.adapters
        }
        if graphs is not None:
            self.executor = GraphedDevice(
                single, self.buffers, True, 64, self.told.append, graphs, COLUMNS, balance > 0
            )

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for adapter in self.adapters for parameter in adapter.named_parameters().values()]

    def owned(self, number: int) -> list[tuple[int, int]]:
        """Owner and length of a microbatch's samples."""
        own = MICROBATCHES[number % len(MICROBATCHES)]
        return [(owner, length // self.shrink) for owner, length in own if owner < len(self.adapters)]

    def collect(self, owners: set[int], step: bool) -> None:
        """As jobs do: gradients go from the parameters to the buffers where they are not there already."""
        for owner in owners:
            for parameter, buffer in self.buffers[owner].values():
                if parameter.grad is not None:  # without a graph
                    buffer += parameter.grad
                parameter.grad = buffer if step else None
            if step:
                self.optimizers[owner].step()
                for parameter, buffer in self.buffers[owner].values():
                    buffer.zero_()
                    parameter.grad = None

    def packed(self, number: int) -> list[Part]:
        generator, packed = np.random.default_rng(number), []
        for index, (owner, length) in enumerate(self.owned(number)):
            sample = Sample(generator.integers(3, TINY["vocab_size"], length).astype(np.int32), np.arange(length) > 2)
            smoothing, noise = 0.1 if owner == 2 else 0.0, (23, 9.0) if owner == 1 else None
            balance = self.balance if owner == min(1, len(self.adapters) - 1) else 0.0
            key = 11 + owner if owner == 0 or self.dropped[owner] else None
            packed.append(PackedSample(owner, sample, index, number, key, smoothing, noise, balance))
        return parts(packed, SCALES)

    def train(self, times: int = 1, evaluate: bool = False) -> list[torch.Tensor]:
        """What the jobs have become, and their losses. Jobs step after every second microbatch, if they own tokens of it."""
        sums: list[torch.Tensor] = []
        numbers = [number for number in range(times * len(MICROBATCHES)) if self.owned(number)]
        packed = [self.packed(number) for number in numbers]
        for at, number in enumerate(numbers):
            sums.append(torch.cat([*run_microbatch(self.executor, packed[at]).sums.values()]))
            self.collect({owner for owner, _ in self.owned(number)}, step=number % 2 == 1)
            for following in packed[at + 1 : at + 2]:
                self.executor.prepare(following)
            if evaluate:  # after a forward that may have been launched ahead
                sums += self.executor.evaluate(packed[at][-1:]).sums.values()
        return [*(p.detach().clone() for p in self.parameters()), *sums]


class Fixed(PlanChooser):
    """Always the same plan; the chain where segments do not move."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(torch.device("cpu"))
        self.plan = plan

    def plan_of(self, x: Any, layers: Any, segments: Any, known: bool = True) -> Plan:
        return CHAIN if known else self.plan


def attention_by_starts(monkeypatch: Any) -> None:
    """Attention that reads where samples begin, in the place of the GPU's."""

    def call(q: Any, k: Any, v: Any, samples: SampleBlocks, scale: float, window: Any, softcap: Any, sinks: Any) -> Any:
        parts = {(first, end) for _, first, end in samples.table[0].T.tolist() if end}
        lengths = [end - first for first, end in sorted(parts)]
        assert sum(lengths) == q.shape[1]
        return by_sample(q, k, v, lengths, scale, window, softcap, sinks_H=sinks)

    monkeypatch.setattr(attention, "uses_kernels", lambda *_: True)
    monkeypatch.setattr(attention, "_one_call", call)


def replay_of(function: Callable[[], None]) -> Callable[[], None]:
    """Runs it again. As a graph's backward does, its backward reads what it has kept as that is by then, and asks nothing.
    A norm would be that of the recording."""

    def replay() -> None:
        kept = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda kept: kept)
        with kept, mock.patch.object(Prepared, "serve"), mock.patch.object(ExpertWeights, "norm", None):
            function()

    return replay


class Pretended:
    """A recorder whose replays run the functions again."""

    def __init__(self, device: torch.device) -> None:
        self.recorded = 0

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        return replay_of(function)


__all__ = ["BESIDE", "JOBS", "MICROBATCHES", "Pretended", "Recorder", "Run", "attention_by_starts", "replay_of"]
