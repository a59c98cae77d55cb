"""Sequence parallelism: processes that have tokens of their own between the cut layers learn what one process learns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
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
    counted,
    error_when_broken,
    learn,
    model_of,
    threes,
)  # fmt: skip

from packlora.adapters.sharded import Shard
from packlora.engine.passes import SingleDevice
from packlora.parallel import sequence
from packlora.parallel.collectives import GATHER, SCATTER, copied
from packlora.parallel.tokens import all_tokens

Pool = Callable[[int], Ranks]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
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
    "wrong", [biases_not_added_up, gradients_of_inputs_added_up_twice, last_tokens_not_joined_back],
    ids=lambda wrong: wrong.__name__,
)  # fmt: skip
def test_the_comparison_sees_what_is_broken(wrong: Callable[[], Any], ranks: Pool) -> None:
    case = case_of("llama", adapter_of("LoRA", bias="all"), steps=2, sequence=True)
    assert min(ranks(2).run(error_when_broken, wrong, case)) > WRONG


def messages(rank: int, case: Case) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Of a forward and a backward of the frozen model, by name; of a step with adapters; and how many tokens norms get."""
    model, tokens = model_of(case, dist.group.WORLD), {}

    def given(name: str) -> Any:
        return lambda _, args: tokens.__setitem__(name, args[0].shape[1])

    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.register_forward_pre_hook(given(name))
    hidden = torch.randn(1, 24, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    with counted() as calls:
        model.base_model(inputs_embeds=hidden, use_cache=False, sample_lengths=(24,)).last_hidden_state.sum().backward()
    return dict(Counter(calls)), dict(Counter(learn(case, dist.group.WORLD).collectives)), tokens


def test_messages_are_those_of_the_frozen_model_and_one_for_each_job(ranks: Pool) -> None:
    """Two layers with two blocks each, two microbatches; nothing flows back into the first block."""
    for frozen, step, tokens in ranks(2).run(messages, case_of("llama", adapter_of("LoRA", 0.1), sequence=True)):
        # forward 4 blocks and the last tokens, backward 4 sums and the first tokens; the sums forward, the blocks backward
        assert frozen == {GATHER: 4 + 1 + 4 + 1, SCATTER: 4 + 4}
        vocabulary = {
            "all_reduce": 2 * 2 + 1,
            "all_gather": 2,
        }  # vectors and gradients, and the job's; numbers of the loss
        assert step == {GATHER: 2 * (4 + 1 + 4), SCATTER: 2 * (4 + 3)} | vocabulary
        assert tokens.pop("model.norm") == 24
        assert len(tokens) == 4
        assert set(tokens.values()) == {12}
