"""What a layer keeps of its groups, and runs of tokens by owner."""

from __future__ import annotations

import gc
import operator
import weakref

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig

from packlora.adapters.attach import attach, attach_one, detach_one
from packlora.adapters.cache import GroupCache
from packlora.adapters.owners import TokenOwners
from packlora.adapters.recorded_groups import cached
from packlora.adapters.spec import resolve
from packlora.base.packing import prepare_model
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.plan import CHAIN
from packlora.ops.lora_linear.types import Layer, Segment


def layer() -> Layer:
    return Layer(Dense(torch.zeros(3, 4)), None, {})


def test_a_group_is_known_while_its_layers_are_the_same_objects() -> None:
    cache, first, second = GroupCache(True), layer(), layer()
    pair = cache.of((first, second))
    alone = cache.of((first,))
    assert pair.state.version_counted and pair.state is not alone.state
    chosen = cache.put(pair, 7, (Segment(0, 0, 3),), CHAIN)
    assert cache.of((first, second)) is chosen and chosen.tokens == 7 and cache.of((first,)) is alone
    other = cache.of((first, layer()))
    assert other.state is not pair.state and other.tokens is None
    assert cache.of((first, second)).state is not pair.state


def test_a_layer_of_jobs_chooses_anew_where_boundaries_dropout_or_gradients_differ() -> None:
    model, config = tiny_model("llama"), LoraConfig(r=2, target_modules=["up_proj"], lora_dropout=0.5)
    attached, _ = attach(model, {name: resolve(config, model, name) for name in "ab"}, 0)
    own = model.model.layers[0].mlp.up_proj
    x, keys = torch.randn(48, own.base.in_features), torch.ones(48, 2, dtype=torch.int32)

    def segments(owners: TokenOwners, needs: bool = False) -> tuple[Segment, ...]:
        with attached.active(owners):
            own(x.detach().requires_grad_(needs))
        (group,) = own.groups._groups.values()
        return group.segments

    halves = ((0, 0, 24), (1, 24, 48))
    first = segments(TokenOwners(48, halves))
    assert first == (Segment(0, 0, 24), Segment(1, 24, 48))
    assert segments(TokenOwners(48, (*halves,))) is first  # of another microbatch that is cut alike
    assert segments(TokenOwners(48, halves, keys)) == (Segment(0, 0, 24, 0.5), Segment(1, 24, 48, 0.5))
    assert segments(TokenOwners(48, halves)) == first
    assert segments(TokenOwners(48, halves), needs=True) is not first
    assert segments(TokenOwners(48, ((1, 0, 48),))) == (Segment(1, 0, 48),)


@pytest.mark.parametrize("recorded", [False, True])
def test_siblings_keep_nothing_of_an_adapter_that_has_left(recorded: bool) -> None:
    """It was on another than the first of them, which by now is computed alone, and is in what is recorded alone."""
    model = tiny_model("llama", num_hidden_layers=1)
    prepare_model(model, False)
    targets = {"stays": "q_proj", "leaves": "v_proj"}
    specs = {job: resolve(LoraConfig(r=2, target_modules=[path]), model, job) for job, path in targets.items()}
    attached, adapters = attach(model, specs, 0)
    first = model.model.layers[0].self_attn.q_proj
    left = [weakref.ref(own) for own in adapters[1].named_parameters().values()]

    def run(*segments: tuple[int, int, int]) -> None:
        with torch.no_grad(), attached.active(TokenOwners(9, segments)):
            model(input_ids=torch.arange(9)[None], sample_lengths=(9,))

    owners = TokenOwners(9, ((0, 0, 9),))
    if recorded:
        cached(owners, [first])
    run((0, 0, 5), (1, 5, 9))
    assert 2 in first.groups._groups
    del adapters
    detach_one(model, 1)
    run((0, 0, 9))
    gc.collect()
    assert set(first.groups._groups) == {1} and not any(own() is not None for own in left)


@pytest.mark.parametrize(
    ("segments", "runs"),
    [
        ((), [(None, 0, 9)]),
        (((1, 0, 9),), [(1, 0, 9)]),
        (((2, 1, 3), (1, 3, 5), (5, 5, 6), (3, 7, 9)), [(None, 0, 3), (1, 3, 5), (None, 5, 7), (3, 7, 9)]),
    ],
)
def test_runs_are_of_all_tokens_in_order(
    segments: tuple[tuple[int, int, int], ...], runs: list[tuple[int | None, int, int]]
) -> None:
    assert TokenOwners(9, segments).runs({1, 3}) == runs


@pytest.mark.parametrize("dora", [False, True])
def test_what_is_recorded_keeps_its_layers_while_others_come_and_go_and_shares_them_where_there_are_none(
    dora: bool,
) -> None:
    """So what was made before a recording is found in it."""
    model = tiny_model("llama", num_hidden_layers=1)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], use_dora=dora)
    spec = resolve(config, model, "a")
    attached, _ = attach(model, {"a": spec, "b": spec}, 0)
    members = [getattr(model.model.layers[0].self_attn, name) for name in ("q_proj", "v_proj")]
    chooser = members[0].chooser

    def found(*adapters: int) -> tuple[GroupCache, tuple[Layer, ...]]:
        owners.append(TokenOwners(9, tuple((number, at, at + 1) for at, number in enumerate(adapters))))
        return cached(owners[-1], members)

    owners: list[TokenOwners] = []
    both, one = found(0, 1), found(0)
    assert both[1] == tuple(member.layer() for member in members)
    assert both[0].of(both[1]).state is members[0].groups.of(both[1]).state is not one[0].of(one[1]).state
    assert one[0] is not both[0] and [own.adapters.keys() for own in one[1]] == [{0}, {0}]
    attach_one(model, attached, "c", 2, spec, 0, dict.fromkeys(spec.modules, chooser))
    for before, again in ((both, found(0, 1)), (one, found(0))):
        assert again[0] is before[0] and all(map(operator.is_, again[1], before[1]))
    detach_one(model, 1)
    gone = [weakref.ref(own) for own in both[1]]
    del both, before, again
    owners[:] = owners[1:2]
    gc.collect()
    assert not any(own() is not None for own in gone) and found(0)[0] is one[0]
