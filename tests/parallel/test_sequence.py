"""Sequence parallelism: processes that have tokens of their own between the cut layers learn what one process learns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import TINY
from ranks import RankFailed, Ranks
from tensor_runs import (
    BOUND,
    PATIENCE,
    WRONG,
    Case,
    adapter_of,
    assert_exact,
    case_of,
    compared,
    error_when_broken,
    job_of,
    learn,
    model_of,
    moved,
    on,
    threes,
)  # fmt: skip

from packlora.adapters.owners import TokenOwners
from packlora.adapters.sharded import Shard
from packlora.engine.passes import SingleDevice
from packlora.ops.dropout.keys import token_keys
from packlora.parallel import sequence
from packlora.parallel.adapter import WholeGradient
from packlora.parallel.collectives import GATHER, SCATTER, SCATTER_SEVERAL, copied
from packlora.parallel.tokens import all_tokens

Pool = Callable[[int], Ranks]


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
def test_what_is_learnt_is_that_of_one_process(size: int, ranks: Pool) -> None:
    """Biases behind the sum, gathered outputs, activations that are recomputed, tokens that are filled up."""
    cases = [
        case_of("llama", *threes(0.1), sequence=True),
        case_of("qwen2", adapter_of("DoRA", bias="all"), sequence=True),
        case_of("qwen3", adapter_of("DoRA", 0.1), adapter_of("rsLoRA"), sequence=True, checkpointing=True),
        case_of("gemma2", adapter_of("LoRA", 0.1), sequence=True, steps=2),
        case_of("phi3", adapter_of("DoRA", 0.1), sequence=True, steps=2),
        case_of("phi", adapter_of("LoRA"), sequence=True, steps=2),
    ]
    assert_exact(ranks(size).run(compared, cases, seconds=PATIENCE))


def as_they_come(rank: int, case: Case) -> float:
    """With numbers of tokens that two does not divide."""
    with mock.patch("tensor_runs.SingleDevice", lambda base, attached, *_: SingleDevice(base, attached)):
        return max(learn(case, dist.group.WORLD).errors(learn(case)).values())


def test_tokens_that_do_not_divide_are_computed_whole(ranks: Pool) -> None:
    case = case_of("llama", adapter_of("DoRA", 0.1), adapter_of("LoRA", r=3), sequence=True)
    assert max(ranks(2).run(as_they_come, case)) < BOUND
    biased = case_of("llama", adapter_of("LoRA", bias="all"), sequence=True)
    with pytest.raises(RankFailed, match=r"trains biases on tokens of its own, but [0-9]*[13579] tokens do not divide"):
        ranks(2).run(as_they_come, biased)


def biases_not_added_up() -> Any:
    own = Shard.is_part
    return mock.patch.object(Shard, "is_part", lambda self, name: name != "bias" and own(self, name))


def gradients_of_inputs_added_up_twice() -> Any:
    return mock.patch.object(sequence, "all_tokens", lambda x, group, *more: copied(all_tokens(x, group, *more), group))


def last_tokens_not_joined_back() -> Any:
    def joined(x: torch.Tensor, group: Any) -> torch.Tensor:
        return all_tokens(x, group)  # whose backward adds up what is the same everywhere

    return mock.patch.object(sequence, "joined_tokens", joined)


@pytest.mark.parametrize(
    "wrong", [
        biases_not_added_up,
        pytest.param(gradients_of_inputs_added_up_twice, marks=pytest.mark.soak),
        pytest.param(last_tokens_not_joined_back, marks=pytest.mark.soak),
    ],
    ids=lambda wrong: wrong.__name__,
)  # fmt: skip
def test_the_comparison_sees_what_is_broken(wrong: Callable[[], Any], ranks: Pool) -> None:
    case = case_of("llama", adapter_of("LoRA", bias="all"), steps=2, sequence=True)
    assert min(ranks(2).run(error_when_broken, wrong, case)) > WRONG


Messages = dict[str, Counter[tuple[str, tuple[int, ...]]]]
"""By phase of a step: name and shape of what each message takes, and how often."""


def messages(rank: int, case: Case) -> tuple[Messages, Messages, set[int]]:
    """Of forward, backward and step over 24 tokens whose embeddings want a gradient, with the adapters and of the frozen model;
    and how many tokens the norms of layers get."""
    model, tokens = model_of(case, dist.group.WORLD), set[int]()
    hidden = torch.randn(1, 24, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    found, jobs = list[Messages](), list[Any]()

    def note(layer: Any, args: Any) -> None:
        tokens.add(args[0].shape[1])

    for layer in model.base_model.layers:
        layer.input_layernorm.register_forward_pre_hook(note)
    for adapted in (False, True):
        owners = None
        if adapted:
            attached, adapters = on(model, case)
            moved(adapters)
            jobs = [job_of(adapter, config) for adapter, config in zip(adapters, case.adapters, strict=True)]
            share = 24 // len(jobs)
            segments = tuple((at, at * share, at * share + share) for at in range(len(jobs)))
            owners = TokenOwners(24, segments, torch.from_numpy(token_keys(1, 2, 3, 24)))
        tokens.clear()  # of what attach looks at
        with attached.active(owners) if owners is not None else nullcontext():
            own: Messages = {}
            with sent() as own["forward"]:
                output = model.base_model(inputs_embeds=hidden, use_cache=False, sample_lengths=(24,)).last_hidden_state
            with sent() as own["backward"]:
                output.square().sum().backward()
        with sent() as own["step"]:
            for job in jobs:
                job.state.norm_of = WholeGradient(job.adapter, dist.group.WORLD).norm
                job.state.collect(torch.zeros(1, dtype=torch.float64))
                assert job.state.step(0.1)[1] > 0
        found.append(own)
    return found[0], found[1], tokens


@contextmanager
def sent() -> Iterator[Counter[tuple[str, tuple[int, ...]]]]:
    """Names of the collective functions that are called, each with the shape that a process gives: of several tensors that of
    the first, and the columns of the others."""
    calls = Counter[tuple[str, tuple[int, ...]]]()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            first, *more = args[2] if name == SCATTER_SEVERAL else [args[0 if name == "all_reduce" else 1]]
            calls[name, (*first.shape, *(own.shape[-1] for own in more))] += 1
            return function(*args, **kwargs)

        return call

    functions = {name: counting(name, getattr(dist, name)) for name in ("all_reduce", "all_gather", GATHER, SCATTER)}
    several = counting(SCATTER_SEVERAL, getattr(dist.ProcessGroup, SCATTER_SEVERAL))
    with mock.patch.multiple(dist, **functions), mock.patch.object(dist.ProcessGroup, SCATTER_SEVERAL, several):
        yield calls


JOBS = {"LoRA": [adapter_of("LoRA", 0.1)], "DoRA": [adapter_of("DoRA", 0.1)], "three jobs": threes(0.1)}


@pytest.mark.parametrize("jobs", JOBS)
def test_a_step_sends_what_the_frozen_model_sends_and_one_message_for_each_job(jobs: str, ranks: Pool) -> None:
    """Four layers with two blocks each. With the sum of a block's input go columns of the ranks of the layers that read it; and
    the first forward with new values of a DoRA adapter adds up the norms of all its row-parallel layers."""
    layers, K = 4, TINY["hidden_size"]
    case = case_of("llama", *JOBS[jobs], sequence=True)
    case = replace(case, model={**case.model, "num_hidden_layers": layers})
    # of the widest adapter: ranks of q, k and v, and of gate and up
    widths = (15, 10) if jobs == "three jobs" else (12, 8)
    for frozen, own, tokens in ranks(2).run(messages, case):
        assert frozen["forward"] == {(GATHER, (12, K)): 2 * layers + 1, (SCATTER, (24, K)): 2 * layers}
        assert frozen["backward"] == {(GATHER, (12, K)): 2 * layers + 1, (SCATTER, (24, K)): 2 * layers}
        norms = {} if jobs == "LoRA" else {("all_reduce", (layers * 2 * K,)): 1}
        assert own["forward"] == frozen["forward"] | norms
        beside = {(SCATTER_SEVERAL, (24, K, width)): layers for width in widths}
        assert own["backward"] == {(GATHER, (12, K)): 2 * layers + 1} | beside
        assert [name for name, _ in own["step"].elements()] == ["all_reduce"] * len(case.adapters)
        assert tokens == {12}


def test_nothing_flows_back_into_the_first_block(ranks: Pool) -> None:
    """Whole steps of training, whose embeddings are frozen: two layers, two microbatches. Its input is kept whole."""
    vocabulary = {"all_reduce": 2 * 2 + 1, "all_gather": 2}  # vectors and gradients, and the job's; numbers of the loss
    for learnt in ranks(2).run(learn_over_group, case_of("llama", adapter_of("LoRA", 0.1), sequence=True)):
        assert learnt == {GATHER: 2 * (4 + 1 + 4), SCATTER: 2 * 4, SCATTER_SEVERAL: 2 * 3} | vocabulary


def learn_over_group(rank: int, case: Case) -> dict[str, int]:
    return dict(Counter(learn(case, dist.group.WORLD).collectives))
