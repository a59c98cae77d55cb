"""What ranks do in tests of adapters on Megatron-Core models: one model in several layouts, whole gradients, steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron_cpu import hash_of, megatron, model_of
from peft import LoraConfig

from packlora.megatron import MegatronAdapters, apply_lora
from packlora.megatron.attach import cut_of
from packlora.ops.dropout.keys import packed_token_keys

LENGTHS = (5, 3, 6, 2)
"""Tokens of the samples of a packed batch; 16 together."""
WORDS = 48
BOUND = 1e-10


@dataclass(frozen=True)
class Layout:
    """tp, ep, etp: tensor, expert and expert tensor parallel sizes."""

    tp: int = 1
    sequence: bool = False
    ep: int = 1
    etp: int = 1


ONE = Layout()
DENSE = (Layout(2), Layout(2, True))


@dataclass(frozen=True)
class Case:
    """adapters: arguments of LoraConfig by name. owners: the adapter of each sample, None of one adapter without owners."""

    adapters: Mapping[str, dict[str, Any]]
    owners: tuple[str | None, ...] | None = None
    model: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[Layout, ...] = DENSE
    recompute: bool = False


def lora(**others: Any) -> dict[str, Any]:
    return {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"} | others


def built(case: Case, layout: Layout) -> tuple[Any, MegatronAdapters]:
    """The model with adapters that have whole values drawn by name."""
    kwargs = dict(case.model)
    model = model_of(tp=layout.tp, sequence=layout.sequence, ep=layout.ep, etp=layout.etp, **kwargs)
    adapters = apply_lora(model, {name: LoraConfig(**one) for name, one in case.adapters.items()})
    randomise(adapters)
    return model, adapters


def randomise(adapters: MegatronAdapters, seed: int = 0) -> None:
    """B and magnitudes that are not those of a beginning; A stays."""
    for name in adapters.names:
        for path, key, parameter in named(adapters, name):
            layer = adapters._placed.layers[path]
            if key == "A" and layer.kind != "embedding":
                continue
            shard = cut_of(layer)
            whole = parameter.shape if shard is None else shard.whole_shape(key, parameter.shape)
            generator = torch.Generator().manual_seed(hash_of(name, path, key, seed))
            value = torch.randn(whole, dtype=torch.float64, generator=generator) * 0.3
            value = value.abs() + 1 if key == "magnitude" else value
            with torch.no_grad():
                parameter.copy_(value if shard is None else shard.own(key, value))


def named(adapters: MegatronAdapters, name: str) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    for path, own in adapters._placed.weights[name].items():
        for key, parameter in own.named_parameters().items():
            yield path, key, parameter


def ids_of(lengths: Sequence[int] = LENGTHS, batch: int = 1) -> torch.Tensor:
    return torch.randint(WORDS, (batch, sum(lengths)), generator=torch.Generator().manual_seed(1))


def mask_of(lengths: Sequence[int]) -> torch.Tensor:
    """True where nothing is seen: each sample sees itself, causally."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    sees = (sample[:, None] == sample[None]).tril()
    return ~sees[None, None]


def keys_of(lengths: Sequence[int] = LENGTHS) -> torch.Tensor:
    numbers = list(range(len(lengths)))
    return torch.from_numpy(packed_token_keys([7] * len(lengths), [2] * len(lengths), numbers, lengths))


def logits(model: Any, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    out: torch.Tensor = model(ids, torch.arange(ids.shape[1])[None], mask_of(lengths))
    return out


def weights_of_loss(tp: int, rank: int) -> torch.Tensor:
    whole = torch.randn(1, sum(LENGTHS), WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return whole.chunk(tp, -1)[rank]


def active(adapters: MegatronAdapters, case: Case, dropout: bool = True) -> Any:
    if case.owners is None:
        return nullcontext()
    samples = list(zip(case.owners, LENGTHS, strict=True))
    return adapters.active(adapters.owners(samples, keys_of() if dropout else None))


def learnt(case: Case, layout: Layout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Whole logits and whole gradients, by adapter, layer and parameter."""
    from megatron.core import parallel_state

    model, adapters = built(case, layout)
    torch.manual_seed(5)
    with active(adapters, case):
        y = logits(model, ids_of(), LENGTHS)
        (y * weights_of_loss(layout.tp, parallel_state.get_tensor_model_parallel_rank())).sum().backward()
    return joined_words(y.detach()), whole_gradients(adapters)


def joined_words(y: torch.Tensor) -> torch.Tensor:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    whole: torch.Tensor = gather_from_tensor_model_parallel_region(y)
    return whole


def whole_gradients(adapters: MegatronAdapters) -> dict[str, torch.Tensor]:
    """What Megatron-Core's own reduction makes of them, joined."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    for name in adapters.names:
        for _, _, parameter in named(adapters, name):
            if getattr(parameter, "average_gradients_across_tp_domain", False):
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size(group)
            if not getattr(parameter, "allreduce", True) and parameter.grad is not None:
                # an expert has seen the tokens of all data parallel processes, here the same ones
                parameter.grad /= parallel_state.get_data_parallel_world_size()
    return wholes(adapters, gradients=True)


def wholes(adapters: MegatronAdapters, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Parameters, or their gradients, of all tensor and expert parallel processes, by adapter, layer and parameter."""
    from packlora.megatron.gather import whole_tensors

    before = []
    if gradients:
        for name in adapters.names:
            for _, _, parameter in named(adapters, name):
                before.append((parameter, parameter.data))
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.data = own
    found = {
        f"{name} {path}/{key}": tensor
        for name in adapters.names
        for path, own in whole_tensors(adapters._placed, name).items()
        for key, tensor in own.items()
    }
    for parameter, data in before:
        parameter.data = data
    return found


def compared(rank: int, cases: Sequence[Case]) -> list[dict[str, float]]:
    """For each case and layout the largest relative differences of logits and gradients from those of one process."""
    out = []
    for case in cases:
        with megatron():
            y, grads = learnt(case, ONE)
        errors = {}
        for layout in case.layouts:
            with megatron(layout.tp, layout.ep, layout.etp):
                own_y, own_grads = learnt(case, layout)
            assert own_grads.keys() == grads.keys(), own_grads.keys() ^ grads.keys()
            errors[f"{layout} logits"] = difference(own_y, y)
            for name, gradient in grads.items():
                assert gradient.any() or "local_experts" in name, f"{name} has no gradient"
                errors[f"{layout} {name}"] = difference(own_grads[name], gradient)
        out.append(errors)
    return out


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    largest = float(b.abs().max())
    return float((a - b).abs().max()) / (largest or 1.0)


def worst(answers: Sequence[Sequence[Mapping[str, float]]]) -> list[tuple[float, str]]:
    """Of each case the largest difference over all ranks, and where."""
    return [
        max((value, name) for errors in of_case for name, value in errors.items())
        for of_case in zip(*answers, strict=True)
    ]


# --- steps -------------------------------------------------------------------------------------------------------------------


def stepped(rank: int, case: Case, layouts: Sequence[Layout], steps: int = 3) -> dict[str, float]:
    """Parameters after steps of Megatron-Core's data parallelism and optimizer, beside torch's AdamW on one process; and the norm
    of the first whole gradient as Megatron-Core counts it."""
    with megatron():
        model, adapters = built(case, ONE)
        parameters = [p for name in adapters.names for p in adapters.parameters(name)]
        optimizer = torch.optim.AdamW(parameters, lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        norm = torch.zeros((), dtype=torch.float64)
        for step in range(steps):
            optimizer.zero_grad()
            _loss(model, adapters, case, step).backward()
            if not step:
                norm = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum().sqrt()
            optimizer.step()
        wanted = wholes(adapters)
    errors = {}
    for layout in layouts:
        with megatron(layout.tp, layout.ep, layout.etp):
            found, own_norm = _with_megatron(case, layout, steps)
        errors[f"{layout} norm"] = abs(own_norm / float(norm) - 1)
        errors |= {f"{layout} {name}": difference(found[name], tensor) for name, tensor in wanted.items()}
    return errors


def _loss(model: Any, adapters: MegatronAdapters, case: Case, step: int) -> torch.Tensor:
    from megatron.core import parallel_state

    torch.manual_seed(step)
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    with active(adapters, case):
        loss: torch.Tensor = (logits(model, ids_of(), LENGTHS) * weights_of_loss(tp, rank)).sum()
    return loss


def _with_megatron(case: Case, layout: Layout, steps: int) -> tuple[dict[str, torch.Tensor], float]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model, adapters = built(case, layout)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    config = OptimizerConfig(
        optimizer="adam", lr=0.05, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=0.0,
        params_dtype=torch.float64, log_num_zeros_in_grad=False,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(config, [wrapped])
    for group in optimizer.param_groups:  # this version's own rule leaves vectors without decay
        group["weight_decay"] = 0.1
    square = torch.zeros((), dtype=torch.float64)
    for step in range(steps):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        _loss(wrapped, adapters, case, step).backward()
        finalize_model_grads([wrapped])
        if not step:
            square = _square(optimizer)
            dist.all_reduce(square, group=parallel_state.get_tensor_and_context_parallel_group())
        optimizer.step()
    return wholes(adapters), float(square.sqrt())


def _square(optimizer: Any) -> torch.Tensor:
    """Of the gradients that Megatron-Core counts on this process."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        one.prepare_grads()
    found = [
        grad.square().sum()
        for one in getattr(optimizer, "chained_optimizers", [optimizer])
        for grad in one.get_main_grads_for_grad_norm()
    ]
    return torch.stack(found).sum()


# --- checkpoints -------------------------------------------------------------------------------------------------------------


def kept(rank: int, folder: str, case: Case, first: Layout, others: Sequence[Layout]) -> list[str]:
    """Names of tensors that other layouts read otherwise than one layout has written them."""
    from pathlib import Path

    from megatron.core import dist_checkpointing

    with megatron(first.tp, first.ep, first.etp):
        _, adapters = built(case, first)
        wanted = wholes(adapters)
        if not rank:
            Path(folder).mkdir()
        dist.barrier()
        dist_checkpointing.save(adapters.sharded_state_dict(), folder)
    wrong = []
    for layout in others:
        with megatron(layout.tp, layout.ep, layout.etp):
            _, adapters = built(case, layout)
            for name in adapters.names:
                for parameter in adapters.parameters(name):
                    parameter.data.fill_(7.0)
            adapters.load_state_dict(dist_checkpointing.load(adapters.sharded_state_dict(), folder))
            found = wholes(adapters)
        wrong += [f"{layout} {name}" for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]
    return wrong
