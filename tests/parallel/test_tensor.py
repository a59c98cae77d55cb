"""Tensor parallelism: adapters on a model that is cut over processes learn what they learn on the whole one, in float64."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import tiny_model
from ranks import Ranks
from seeds import SOAK
from tensor_runs import (
    BOUND,
    KINDS,
    PATIENCE,
    WRONG,
    Case,
    adapter_of,
    assert_exact,
    case_of,
    compared,
    counted,
    difference,
    error_when_broken,
    learn,
    model_of,
    on,
    threes,
)  # fmt: skip
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaMLP

from packlora.adapters import linear
from packlora.adapters.attach import Adapter
from packlora.adapters.files import save_adapter
from packlora.adapters.reading import load_adapter
from packlora.adapters.sharded import AdaptedSlice, ShardedLinear
from packlora.adapters.weights import AdapterWeights
from packlora.base.packing import prepare_model
from packlora.base.proof import check_packing, own_logits
from packlora.errors import InputError
from packlora.ops.cross_entropy.linear_cross_entropy import linear_cross_entropy
from packlora.ops.cross_entropy.reference import IGNORE
from packlora.parallel import collectives, tensor, vocabulary
from packlora.parallel.adapter import WholeGradient, joined
from packlora.parallel.collectives import copied
from packlora.parallel.tensor import shard
from packlora.parallel.vocabulary import part_of

Pool = Callable[[int], Ranks]
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2")


def singles() -> Iterator[tuple[str, dict[str, Any]]]:
    for kind, dropout, bias in itertools.product(KINDS, (0.0, 0.1), ("none", "all")):
        yield f"{kind} {dropout} {bias}", adapter_of(kind, dropout, bias)


def some_cases(size: int) -> list[Case]:
    """Every kind, dropout and bias on some family, all families with three adapters; of larger groups some of them."""
    found = [case_of(FAMILIES[(at + at // 4) % 4], one) for at, (_, one) in enumerate(singles())]
    found = [replace(case, model={**case.model, "num_hidden_layers": 1}) for case in found]  # which has two blocks
    found = found if size == 2 else found[1 :: 4 if SOAK else 6]
    families = FAMILIES if size == 2 or SOAK else ("qwen2", "gemma2")
    found += [case_of(family, *threes(0.1 if at % 2 == size // 2 - 1 else 0.0)) for at, family in enumerate(families)]
    low_rank = [adapter_of("DoRA", 0.1, dora_dropout="low_rank"), adapter_of("LoRA", 0.1)]
    return [*found, case_of("llama", *low_rank, checkpointing=True)]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_what_is_learnt_is_that_of_one_process(size: int, ranks: Pool) -> None:
    """Losses, whole gradients, their norms and the parameters after three steps. Of 4 processes two share a key-value head."""
    assert_exact(ranks(size).run(compared, some_cases(size), seconds=PATIENCE))


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.soak), True])
def test_what_is_learnt_by_graphs_is_that_of_one_process(sequence: bool, ranks: Pool) -> None:
    """Microbatches are padded to shapes, which all processes record and replay at the same time."""
    case = case_of("llama", adapter_of("LoRA", 0.1, "all"), sequence=sequence, recorded=True)
    more = case_of("qwen2", adapter_of("DoRA", 0.1), sequence=sequence, recorded=True, checkpointing=True)
    assert_exact(ranks(2).run(compared, [case, more], seconds=PATIENCE))


class Operators(TorchDispatchMode):
    """Counts the operators that torch runs."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def operators_of_a_norm(rank: int, layers: int) -> int:
    """Number of operators that make the gradient of an adapter whole."""
    case = Case("llama", (adapter_of("DoRA"),), {"num_hidden_layers": layers})
    _, (adapter,) = on(model_of(case, dist.group.WORLD), case)
    whole = WholeGradient(adapter, dist.group.WORLD)
    with Operators() as found:
        whole.norm(torch.ones_like(adapter.flat))
    return found.count


def test_a_step_s_message_takes_as_many_operators_for_any_number_of_layers(ranks: Pool) -> None:
    one, three = (ranks(2).run(operators_of_a_norm, layers) for layers in (1, 3))
    assert one == three


def test_other_families_learn_the_same(ranks: Pool) -> None:
    """Fused projections and norms over all heads, whose outputs are gathered; biases in all layers; windows."""
    plain = ("mistral", "gemma", "gemma3", "phi3", "olmo2", "granite", "cohere", "phi")
    cases = [Case(name, (adapter_of("DoRA" if at % 2 else "LoRA", 0.1),), steps=2) for at, name in enumerate(plain)]
    cases += [Case(name, (adapter_of("DoRA", 0.1, "lora_only"),), steps=2) for name in ("glm4", "starcoder2")]
    usual = ("mistral", "phi3", "olmo2", "phi")  # one of each
    cases = [case for case in cases if SOAK or case.family in usual]
    assert_exact(ranks(2).run(compared, cases, seconds=PATIENCE))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_vocabulary_in_parts_teaches_what_the_whole_one_teaches(size: int, ranks: Pool) -> None:
    """Of words that do not divide, one or three too many; tied or not; gemma2 caps its logits, so they are joined."""
    words = [
        {"vocab_size": 321},
        {"vocab_size": 323, "tie_word_embeddings": True},
        {"vocab_size": 323, "pad_token_id": 322},
    ]
    cases = [case_of("qwen2", *threes(0.1)), case_of("llama", adapter_of("LoRA"), steps=2)]
    cases += [case_of("gemma2", adapter_of("LoRA"), steps=2)]
    assert_exact(
        ranks(size).run(compared, [replace(c, model=w) for c, w in zip(cases, words, strict=True)], seconds=PATIENCE)
    )


def parted(rank: int, dtype: torch.dtype, chunk_bytes: int | None) -> list[tuple[float, float]]:
    """Errors of losses and gradients of an output layer in parts; its words divide, do not, and are as few as the processes."""
    errors, group = [], dist.group.WORLD
    for words in (64, 65, 67, dist.get_world_size()):
        generator = torch.Generator().manual_seed(words)
        hidden, weight, bias = (
            torch.randn(*shape, generator=generator).to(dtype) for shape in ((70, 8), (words, 8), (words,))
        )
        labels, weights = torch.randint(words, (70,), generator=generator), torch.rand(70, generator=generator).double()
        labels[3], labels[5], labels[7], hidden[5], hidden[9] = IGNORE, IGNORE, words, math.nan, math.nan
        own = part_of(words, group)
        here = slice(own.start, own.start + own.count)
        pairs = []
        for operands, part in (((weight, bias), None), ((weight[here], bias[here]), own)):
            leaf = hidden.clone().requires_grad_()
            losses, total = linear_cross_entropy(leaf, *operands, labels, weights, chunk_bytes, part)
            with torch.no_grad():
                again, _ = linear_cross_entropy(leaf, *operands, labels, weights, chunk_bytes, part)
            assert torch.equal(losses.nan_to_num(-1), again.nan_to_num(-1))
            pairs.append((losses, *torch.autograd.grad(2 * total, leaf)))
        assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(*pairs, strict=True)), words
        assert [row for row in range(70) if pairs[1][0][row].isnan()] == [7, 9]
        assert not pairs[1][1][[3, 5]].any()
        errors.append(
            tuple(difference(b.nan_to_num().double(), a.nan_to_num().double()) for a, b in zip(*pairs, strict=True))
        )
    return errors


@pytest.mark.parametrize("size", [2, 4])
def test_losses_over_parts_of_the_vocabulary_are_those_of_the_whole_one(size: int, ranks: Pool) -> None:
    """No bfloat16 with AMX, where oneDNN reads the first number of the next row, here a NaN, behind a row of odd length."""
    dtypes = [(torch.float64, 1e-14)] + [(torch.bfloat16, 1e-2)] * (not torch.cpu._is_amx_tile_supported())
    for dtype, bound in dtypes:
        for chunk_bytes in (None, 1):
            for errors in ranks(size).run(parted, dtype, chunk_bytes):
                assert max(itertools.chain(*errors)) < bound, (dtype, errors)


def inputs_recomputed(rank: int, case: Case) -> tuple[float, int, int]:
    """The largest error; how many inputs of layers' calls are recomputed, alone and over the group."""
    known: list[bool] = []

    def recompute_of(x: torch.Tensor) -> Any:
        known.append(own(x) is not None)
        return own(x)

    own = linear.recompute_of
    with mock.patch.object(linear, "recompute_of", recompute_of):
        exact, alone = learn(case), sum(known)
        learnt = learn(case, dist.group.WORLD)
    return max(learnt.errors(exact).values()), alone, sum(known) - alone


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.soak), True])
def test_what_is_not_kept_for_the_backward_alone_is_not_kept_over_processes(sequence: bool, ranks: Pool) -> None:
    """Nor is the output of a sum taken for that of a layer. With sequence parallelism the first block keeps its input, one of
    six of a microbatch: nothing flows back into it, so it has no message for the gradients of its A's."""
    case = case_of("llama", adapter_of("DoRA"), saving=True, sequence=sequence)
    for error, alone, here in ranks(2).run(inputs_recomputed, case):
        assert error < BOUND
        assert here == alone - sequence * alone // 6 > 0


def proved(rank: int, family: str) -> bool:
    model, longest = tiny_model(family, torch.float64), {"job": 60}
    own = own_logits(model, family, longest)
    notes = shard(model, dist.group.WORLD)
    return check_packing(model, own, family, longest, notes + prepare_model(model, False))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_model_passes_the_proof_of_packing_with_the_logits_of_the_whole_one(family: str, ranks: Pool) -> None:
    assert ranks(4).run(proved, family) == [family != "gemma2"] * 4


# --- broken on purpose -------------------------------------------------------------------------------------------------


def masks_from_feature_0() -> Any:
    return mock.patch.object(AdaptedSlice, "first_feature", 0)


def gradients_of_inputs_added_up_twice() -> Any:
    return mock.patch.object(tensor, "copied", lambda x, group: copied(copied(x, group), group))


def sums_of_own_words() -> Any:
    def own(words: int, group: Any) -> Any:
        part = part_of(words, group)
        return replace(part, join=lambda found: found[None])

    return mock.patch.object(vocabulary, "part_of", own)


def vectors_of_own_words() -> Any:
    return mock.patch.object(vocabulary, "summed", lambda y, group: y)


def biases_before_the_sum() -> Any:
    def early(self: Any, y: torch.Tensor, owners: Any) -> torch.Tensor:
        for _ in range(dist.get_world_size(dist.group.WORLD)):
            y = with_biases(self, y, owners)
        return y

    with_biases = AdaptedSlice._with_biases
    return mock.patch.object(AdaptedSlice, "_with_biases", early)


def drawn_by_slices() -> Any:
    def own(self: Any, name: str, whole: torch.Tensor) -> torch.Tensor:
        return whole

    def whole_shape(self: Any, name: str, shape: Any) -> Any:
        return shape

    return mock.patch.multiple(AdapterWeights, own=own, whole_shape=whole_shape)


BREAKS: dict[Callable[[], AbstractContextManager[Any]], dict[str, Any]] = {
    masks_from_feature_0: adapter_of("LoRA", 0.1),
    gradients_of_inputs_added_up_twice: adapter_of("LoRA"),
    sums_of_own_words: adapter_of("LoRA"),
    vectors_of_own_words: adapter_of("LoRA"),
    biases_before_the_sum: adapter_of("LoRA", bias="all"),
}


USUAL = (masks_from_feature_0, sums_of_own_words)


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(own, marks=[pytest.mark.soak] * (own not in USUAL)) for own in BREAKS],
    ids=lambda wrong: wrong.__name__,
)
def test_the_comparison_sees_what_is_broken(wrong: Callable[[], Any], ranks: Pool) -> None:
    case = case_of("llama", BREAKS[wrong], steps=2)
    assert min(ranks(2).run(error_when_broken, wrong, case)) > WRONG


# --- first values, files -----------------------------------------------------------------------------------------------


def started(case: Case, group: Any = None) -> list[Adapter]:
    return on(model_of(case, group), case)[1]


def start_differs(rank: int, case: Case, broken: bool = False) -> list[float]:
    """By tensor, from that of one process."""
    (alone,) = started(case)
    if broken:
        with drawn_by_slices():
            (here,) = started(case, dist.group.WORLD)
    else:
        (here,) = started(case, dist.group.WORLD)
    whole = joined(here, dist.group.WORLD, here.flat)
    assert here.num_parameters == alone.num_parameters
    return [difference(whole[name], own.detach()) for name, own in alone.named_parameters().items()]


@pytest.mark.parametrize("size", [2, 4])
def test_adapters_begin_with_the_same_values_in_any_number_of_slices(size: int, ranks: Pool) -> None:
    case = case_of("llama", adapter_of("DoRA", bias="all"))
    assert max(ranks(size).run(start_differs, case)[0]) < 1e-15
    assert max(ranks(size).run(start_differs, case, True)[0]) > WRONG


def saved(rank: int, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    (adapter,) = started(case, dist.group.WORLD)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for name, parameter in adapter.named_parameters().items():
            path, _, leaf = name.rpartition("/")
            own = adapter.weights[path]
            parameter.copy_(own.own(leaf, torch.randn(own.whole_shape(leaf, parameter.shape), generator=generator)))
    whole = joined(adapter, dist.group.WORLD, adapter.flat)
    if rank == 0:
        save_adapter(folder, adapter, whole)
    dist.barrier()
    return whole


def loaded(rank: int, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    (adapter,) = started(case, dist.group.WORLD)
    load_adapter(folder, adapter)
    return joined(adapter, dist.group.WORLD, adapter.flat)


def test_folders_hold_whole_adapters_and_are_read_in_any_number_of_slices(ranks: Pool, tmp_path: Path) -> None:
    case = case_of("llama", adapter_of("DoRA", bias="all"))
    written = ranks(2).run(saved, case, tmp_path)[0]
    (alone,) = started(case)
    load_adapter(tmp_path, alone)
    for found in (alone.named_parameters(), *ranks(4).run(loaded, case, tmp_path)):
        assert found.keys() == written.keys()
        assert all(torch.equal(found[name], written[name]) for name in written)


def cut_again(rank: int, case: Case) -> bool:
    (adapter,) = started(case, dist.group.WORLD)
    again = adapter.own_of(joined(adapter, dist.group.WORLD, adapter.flat))
    return all(torch.equal(again[name], own) for name, own in adapter.named_parameters().items())


def test_what_was_joined_is_cut_to_what_it_was(ranks: Pool) -> None:
    assert all(ranks(4).run(cut_again, case_of("qwen2", adapter_of("DoRA", bias="all"))))


# --- messages ----------------------------------------------------------------------------------------------------------


def messages(rank: int, case: Case) -> tuple[int, list[str]]:
    """Of a forward and a backward of the frozen model, and of a step with adapters."""
    model = model_of(case, dist.group.WORLD)
    hidden = torch.randn(1, 20, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    with counted() as calls:
        model.base_model(inputs_embeds=hidden, use_cache=False, sample_lengths=(20,)).last_hidden_state.sum().backward()
    return len(calls), learn(case, dist.group.WORLD).collectives


@pytest.mark.parametrize(("kind", "jobs"), [("LoRA", 1), *((kind, 2) for kind in KINDS)])
def test_a_step_sends_what_the_frozen_model_sends_and_one_message_for_each_job(
    kind: str, jobs: int, ranks: Pool
) -> None:
    """For the norms of DoRA one more, of all jobs together. Of two microbatches; nothing flows back into the first block. The
    vocabulary takes three each: vectors of words, two numbers a row of the loss, and the gradient of the hidden states."""
    for frozen, calls in ranks(2).run(messages, case_of("llama", *[adapter_of(kind, 0.1)] * jobs)):
        assert frozen == 2 * 2 + 2 * 2
        assert Counter(calls) == {"all_reduce": 2 * (frozen - 1 + 2) + jobs + (kind == "DoRA"), "all_gather": 2}


# --- what cannot be cut ------------------------------------------------------------------------------------------------


def refusal(model: Any, degree: int) -> str:
    with (
        mock.patch.object(dist, "get_world_size", return_value=degree), mock.patch.object(dist, "get_rank", return_value=0),
        pytest.raises(InputError) as caught,
    ):  # fmt: skip
        shard(model, None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "degree", "says"),
    [
        ({}, 3, "over 3 processes: model.layers.0.self_attn.q_proj has 4 heads of 16, which 3 does not divide"),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 100},
            8,
            "gate_proj has 100 outputs",
        ),
        ({"intermediate_size": 90}, 2, "mlp.down_proj would get 45 of its 90 inputs, an odd number"),
        ({"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}, 2, "k_proj has 3 heads of 16"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_number(changes: Any, degree: int, says: str) -> None:
    assert says in refusal(tiny_model("llama", **changes), degree)


def test_layers_that_are_not_known_are_refused_by_name() -> None:
    model = tiny_model("llama")
    model.tp_plan = {**model.tp_plan, "model.layers.*.mlp.gate_proj": "packed_colwise"}
    assert "model.layers.0.mlp.gate_proj as 'packed_colwise', which this version cannot cut" in refusal(model, 2)
    model.tp_plan = {}
    assert "transformers has no plan for llama models" in refusal(model, 2)


def test_a_block_whose_input_goes_elsewhere_is_refused() -> None:
    own = LlamaMLP.forward
    with mock.patch.object(LlamaMLP, "forward", lambda self, x: own(self, x) + x):
        assert "others than the cut layers read the input of model.layers.0.mlp" in refusal(tiny_model("llama"), 2)
    with mock.patch.object(LlamaMLP, "forward", lambda self, x: own(self, x.clone())):
        assert "model.layers.0.mlp.gate_proj of this llama model does not read what its block is given" in refusal(
            tiny_model("llama"), 2
        )


def test_a_model_that_is_looked_at_is_as_before() -> None:
    model = tiny_model("llama")
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    refusal(tiny_model("llama"), 3)
    block = {"model.layers.0.mlp": ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]}
    assert tensor._check_blocks(model, block, tensor._cuts(model, 2), "") == []
    after = model.state_dict(keep_vars=True)
    assert all(
        id(after[name]) == number and torch.equal(after[name], value) for name, (number, value) in before.items()
    )
    assert hooks == [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    assert model.config._attn_implementation == "eager"
    assert collectives.copied(torch.ones(2), None).requires_grad is False


def test_a_whole_layer_is_freed_before_the_next_one_is_cut() -> None:
    """So a model that fills its device can be cut there."""
    model = tiny_model("llama")
    whole = [weakref.ref(module) for module in model.modules() if type(module) is torch.nn.Linear]
    alive: list[int] = []

    def cut(linear: Any, own: Any) -> ShardedLinear:
        alive.append(sum(one() is not None for one in whole))
        return ShardedLinear(linear, own)

    with (
        mock.patch.object(dist, "get_world_size", return_value=2), mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(tensor, "ShardedLinear", cut),
    ):  # fmt: skip
        shard(model, None)
    assert alive == list(range(len(whole), 1, -1)), "all but the output layer"
