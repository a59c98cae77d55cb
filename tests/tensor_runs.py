"""Training of tiny models over the processes of a tensor-parallel group, and by one process alone, by the project's own path:
attach, microbatches of SingleDevice, a Job's steps. Functions run on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import FAMILIES, TINY, tiny_model
from graph_runs import Pretended, attention_by_starts
from packed import PackedSample, parts
from steps import take_steps

from packlora.adapters.attach import Adapter, attach
from packlora.adapters.linear import AdaptedLinear, Attached
from packlora.adapters.spec import resolve
from packlora.base.model import Base
from packlora.base.packing import prepare_model
from packlora.config import AdapterConfig, JobConfig
from packlora.config.peft import peft_config
from packlora.data.dataset import JobData
from packlora.data.encode import Sample
from packlora.engine.graphs import GraphedDevice
from packlora.engine.parts import Part
from packlora.engine.passes import SingleDevice, run_microbatch
from packlora.ops.lora_linear.frozen import InMemory
from packlora.ops.recompute_hooks import add_recompute
from packlora.parallel.adapter import WholeGradient, joined
from packlora.parallel.collectives import GATHER, SCATTER, SCATTER_SEVERAL, all_of
from packlora.parallel.cut import Slices
from packlora.parallel.tensor import shard
from packlora.runtime.cuda_graphs import buffers_of, columns_of
from packlora.runtime.job import Job
from packlora.runtime.keep_outputs import keep_outputs
from packlora.seeding import stable_hash

MORE_FAMILIES = {
    "phi3": ("Phi3Config", {}), "starcoder2": ("Starcoder2Config", {}), "phi": ("PhiConfig", {}),
    "olmo2": ("Olmo2Config", {}), "glm4": ("Glm4Config", {"head_dim": 16}), "granite": ("GraniteConfig", {}),
    "cohere": ("CohereConfig", {}),
}  # fmt: skip
BOUND, WRONG = 1e-10, 1e-3
PATIENCE = 400.0
"""Seconds for many cases, on a machine that does other things too."""
KINDS: dict[str, dict[str, Any]] = {"LoRA": {}, "rsLoRA": {"use_rslora": True}, "DoRA": {"use_dora": True}}
BIASED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}, "gemma2": {"attention_bias": True},
}  # fmt: skip
"""What gives a family biases; qwen2 has them."""
COLLECTIVES = ("all_reduce", "all_gather", GATHER, SCATTER, "all_to_all", "broadcast", "send")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model and the adapters that are trained on it together.

    family, model: of tiny_model. adapters: keys of AdapterConfig by job. checkpointing: of the model's layers.
    """

    family: str
    adapters: tuple[Mapping[str, Any], ...]
    model: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    steps: int = 3
    sequence: bool = False
    """Each process has tokens of its own between the layers."""
    tensor: int = 0
    """Of a model whose experts the whole group shares: processes that hold each of the other layers together, if any."""
    saving: bool = False
    """As on a GPU: layers' inputs are recomputed where that is cheap; and DoRA layers keep their outputs where they can."""
    recorded: bool = False
    """Over the group by the executor with graphs, which are pretended."""

    def __str__(self) -> str:
        return f"{self.family} {dict(self.model)} {[dict(adapter) for adapter in self.adapters]} {self.checkpointing}"


def adapter_of(kind: str, dropout: float = 0.0, bias: str = "none", r: int = 4, **more: Any) -> dict[str, Any]:
    return {"r": r, "lora_alpha": 6, "lora_dropout": dropout, "bias": bias, **KINDS[kind], **more}


def case_of(family: str, *adapters: dict[str, Any], **changes: Any) -> Case:
    biased = any(adapter["bias"] != "none" for adapter in adapters)
    return Case(family, adapters, BIASED.get(family, {}) if biased else {}, **changes)


def threes(dropout: float) -> list[dict[str, Any]]:
    """All kinds beside each other, with biases trained on all layers, on some and on none."""
    return [
        adapter_of("LoRA", dropout, "all", 3, target_modules=["q_proj", "up_proj", "down_proj"]),
        adapter_of("DoRA", dropout, "lora_only", 5),
        adapter_of("rsLoRA", dropout / 2, "none", 4, target_modules=["k_proj", "o_proj", "gate_proj", "down_proj"]),
    ]


@dataclass
class Learnt:
    """What training gave, each as named tensors: losses, and the whole gradients and parameters of all adapters."""

    losses: Tensors
    gradients: Tensors
    norms: Tensors
    parameters: Tensors
    collectives: list[str]
    """Names of the collective calls of each step, the whole last one."""

    def errors(self, want: Learnt) -> dict[str, float]:
        """By kind, the largest relative difference of a tensor, and of which."""
        found = {}
        for kind in ("losses", "gradients", "norms", "parameters"):
            got, exact = getattr(self, kind), getattr(want, kind)
            assert got.keys() == exact.keys()
            assert all(got[name].shape == exact[name].shape for name in got), kind
            worst = max(got, key=lambda name: difference(got[name], exact[name]))
            found[f"{kind}: {worst}"] = difference(got[worst], exact[worst])
        return found


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, 1e-6)


def model_of(case: Case, group: Any = None) -> Any:
    """Prepared as load_base does; cut over the group where there is one.

    Its RMS norms are torch's, in float64: those of transformers are in float32, which rounds parts of a gradient otherwise than
    their sum.
    """
    with mock.patch.dict(FAMILIES, MORE_FAMILIES):
        model = tiny_model(case.family, torch.float64, **case.model)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(normed, module)
    if group is not None:
        shard(model, group, case.sequence)
    prepare_model(model, case.checkpointing)
    return model


def on(model: Any, case: Case) -> tuple[Attached, list[Adapter]]:
    specs = {}
    for number, adapter in enumerate(case.adapters):
        config = peft_config(AdapterConfig.model_validate(adapter), "tiny", None)
        specs[f"job{number}"] = resolve(config, model, f"job{number}")
    return attach(model, specs, 7)


def moved(adapters: list[Adapter]) -> None:
    """Other values than the first ones, drawn whole, so that no gradient is zero."""
    for adapter in adapters:
        for name, parameter in adapter.named_parameters().items():
            path, _, leaf = name.rpartition("/")
            own = adapter.weights[path]
            generator = torch.Generator().manual_seed(stable_hash(adapter.name, name) % 2**31)
            whole = torch.randn(own.whole_shape(leaf, parameter.shape), generator=generator, dtype=torch.float64)
            with torch.no_grad():
                parameter.add_(own.own(leaf, whole) / 8)


def samples_of(step: int, part: int, jobs: list[Job]) -> list[Part]:
    """Of a microbatch: one or two samples of each job, but in odd parts none of the first one where there are others."""
    packed, generator = [], np.random.default_rng(10 * step + part)
    for owner, job in enumerate(jobs):
        for number in range(0 if part % 2 and owner == 0 and len(jobs) > 1 else 1 + (owner + part) % 2):
            length = int(generator.integers(9, 24))
            ids = generator.integers(3, TINY["vocab_size"], length).astype(np.int32)
            packed.append(
                PackedSample(owner, Sample(ids, np.arange(length) > 2), number + 2 * part, step, job.dropout_key)
            )
    return parts(packed, np.full(len(jobs), 0.05))


def job_of(adapter: Adapter, config: Mapping[str, Any]) -> Job:
    train = {"max_steps": 9, "learning_rate": 0.01, "max_grad_norm": 0.5, "weight_decay": 0.1}
    tree = {"name": adapter.name, "data": {"path": "rows"}, "adapter": dict(config), "train": train}
    job_config = JobConfig.model_validate(tree)
    samples = [Sample(np.arange(5, dtype=np.int32), np.arange(5) > 0)] * 8
    return Job(job_config, JobData(adapter.name, samples, job_config.train, 3), [], adapter)


@contextmanager
def counted() -> Iterator[list[str]]:
    """Names of the collective functions that are called."""
    calls: list[str] = []

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    several = counting(SCATTER_SEVERAL, getattr(dist.ProcessGroup, SCATTER_SEVERAL))
    functions = {name: counting(name, getattr(dist, name)) for name in COLLECTIVES}
    with mock.patch.multiple(dist, **functions), mock.patch.object(dist.ProcessGroup, SCATTER_SEVERAL, several):
        yield calls


def learn(case: Case, group: Any = None) -> Learnt:
    """Train it: over the group, or alone."""
    model = model_of(case, group)
    with pytest.MonkeyPatch.context() as patched:
        if case.recorded:
            attention_by_starts(patched)
        return learn_on(model, case, group)


def learn_on(model: Any, case: Case, group: Any) -> Learnt:
    attached, adapters = on(model, case)
    moved(adapters)
    if case.saving:
        add_recompute(model)
        keep_outputs(model)
        assert any(layer.keep_output for layer in model.modules() if isinstance(layer, AdaptedLinear))
    jobs = [job_of(adapter, config) for adapter, config in zip(adapters, case.adapters, strict=True)]
    gradients: Tensors = {}

    def whole(adapter: Adapter, flat: torch.Tensor | None = None) -> Tensors:
        if group is not None:
            return joined(adapter, group, adapter.flat if flat is None else flat)
        return {name: own.clone() for name, own in adapter.layout.views(adapter.flat if flat is None else flat).items()}

    for job in jobs:
        is_repeated = group is not None and 0 < case.tensor <= dist.get_rank(group)
        norm_of = job.state.norm_of if group is None else WholeGradient(job.adapter, group, is_repeated).norm

        def recorded(gradient: torch.Tensor, job: Job = job, norm_of: Any = norm_of) -> torch.Tensor:
            norm: torch.Tensor = norm_of(gradient)
            with mock.patch.multiple(dist, **plain):
                found = whole(job.adapter, gradient)
            gradients.update({f"{job.step} {job.name} {name}": value.clone() for name, value in found.items()})
            return norm

        job.state.norm_of = recorded
    multiple = dist.get_world_size(group) if case.sequence and group is not None else 1
    fused = case.family not in ("gemma2", "cohere")  # which cap and scale logits
    storage = InMemory() if group is None else Slices()
    base = Base(model, None, torch.device("cpu"), "tiny", [], fused_loss=fused, storage=storage)
    executor: Any = SingleDevice(base, attached, multiple)
    if case.recorded and group is not None:
        buffers = buffers_of([job.state for job in jobs])
        executor = GraphedDevice(executor, buffers, True, 64, recorder=Pretended, columns=columns_of(jobs))
    losses, norms = {}, {}
    plain = {name: getattr(dist, name) for name in COLLECTIVES}
    for step in range(case.steps):
        with counted() as calls:
            for part in range(2):
                result = run_microbatch(executor, samples_of(step, part, jobs))
                for owner, tokens in result.tokens.items():
                    jobs[owner].state.added = result.added.get(owner, frozenset())
                    jobs[owner].state.collect(result.sums[owner])
                    jobs[owner].count(tokens)
            for job, told in zip(jobs, take_steps(jobs), strict=True):
                assert told.refused is None, job.failure
                losses[f"{step} {job.name}"] = torch.tensor(job.log_history[-1]["loss"], dtype=torch.float64)
                norms[f"{step} {job.name}"] = torch.tensor(told.norm, dtype=torch.float64)
    evaluated = executor.evaluate(samples_of(case.steps, 0, jobs)).sums
    losses["evaluated"] = torch.stack([evaluated[owner] for owner in sorted(evaluated)])
    if case.recorded and group is not None:
        assert executor.why_not is None and any(body.recorded for body in executor._bodies.values()), executor.why_not
    parameters = {f"{job.name} {name}": value for job in jobs for name, value in whole(job.adapter).items()}
    assert all(not job.state.untrained for job in jobs)
    if group is not None:
        for job in jobs:
            assert_alike(job.adapter, group)
    return Learnt(losses, gradients, norms, parameters, calls)


def assert_alike(adapter: Adapter, group: Any) -> None:
    """What several processes hold has the same bits on all of them."""
    views = [adapter.layout.views(own) for own in all_of(adapter.flat, group)]
    for name in adapter.layout.places:
        path, _, leaf = name.rpartition("/")
        shard = adapter.weights[path].shard
        assert shard is not None
        copies = shard.copies if shard.is_slice(leaf) else len(views)
        assert all(torch.equal(views[at][name], views[at - at % copies][name]) for at in range(len(views))), name


def compared(rank: int, cases: list[Case]) -> list[dict[str, float]]:
    """By case, the largest relative errors over the group beside one process alone; each rank has some of the cases."""
    own = {at: learn(case) for at, case in enumerate(cases) if at % dist.get_world_size() == rank}
    learnt = [learn(case, dist.group.WORLD) for case in cases]
    return [learnt[at].errors(exact) for at, exact in own.items()]


def assert_exact(answers: list[list[dict[str, float]]]) -> None:
    for errors in itertools.chain(*answers):
        assert max(errors.values()) < BOUND, errors


def error_when_broken(rank: int, wrong: Callable[[], Any], case: Case) -> float:
    exact = learn(case)
    with wrong(), mock.patch("tensor_runs.assert_alike"):
        return max(learn(case, dist.group.WORLD).errors(exact).values())
