"""Sampling's own work beside the model: which prompts enter together, the order of a pass's rows, and how tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from sampling_cases import prompt
from torch.utils._python_dispatch import TorchDispatchMode

from packlora.adapters.linear import Attached
from packlora.base.kv_cache import KeyValueCache
from packlora.engine import draw as drawing
from packlora.engine.decode import FEW, Layout, NextToken, Prompt, _order, lay_out
from packlora.engine.draw import draw, inverse_in_blocks
from packlora.engine.generate import Sampler
from packlora.engine.sampling import SampleRequest

V = 320
RULES = [
    {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.7}, {"temperature": 1.7, "top_k": 9},
    {"temperature": 1.0, "top_k": 9, "top_p": 0.4}, {"temperature": 1.0, "top_p": 0.2}, {"temperature": 0.0, "top_k": 3},
]  # fmt: skip


class Counted:
    """Passes that write down how many tokens each prefill had."""

    def __init__(self) -> None:
        self.cache, self.prefilled = KeyValueCache(), list[int]()

    def prefill(self, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
        self.prefilled.append(sum(len(one.ids) for one in prompts))
        return [torch.zeros(len(one.places), V) for one in prompts]

    def decode(self, tokens: Sequence[NextToken]) -> torch.Tensor:
        return torch.zeros(len(tokens), V)

    def free(self) -> None:
        self.cache.free()


@pytest.mark.parametrize(
    ("runs", "number", "how", "prefilled"),
    [(False, 64, {}, [4096]), (False, 130, {}, [8192, 128]), (True, 40, {}, [64, 2048, 512]),
     (False, 40, {"prompt_logprobs": True}, [2048, 512])],
)  # fmt: skip
def test_many_prompts_enter_at_once_where_no_sample_waits_for_them(
    runs: bool, number: int, how: dict[str, Any], prefilled: list[int]
) -> None:
    passes = Counted()
    sampler = Sampler(tiny_model("llama"), Attached([]), rows=256, context=512, passes=passes)
    if runs:
        sampler.submit(SampleRequest(prompt(0, 64), max_tokens=9, temperature=0.0))
        sampler.step()
    for at in range(number):
        sampler.submit(SampleRequest(prompt(at, 64), max_tokens=5, temperature=0.0, **how))
    while sampler.waiting:
        sampler.step()
    assert passes.prefilled == prefilled


def test_fewer_prompts_enter_at_once_after_memory_has_run_out() -> None:
    class Short(Counted):
        def prefill(self, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
            if sum(len(one.ids) for one in prompts) > 4096:
                raise torch.OutOfMemoryError("4096 tokens fit")
            return super().prefill(prompts)

    passes = Short()
    sampler = Sampler(tiny_model("llama"), Attached([]), rows=256, context=512, passes=passes)
    for at in range(70):
        sampler.submit(SampleRequest(prompt(at, 64), max_tokens=2, temperature=0.0))
    with pytest.raises(torch.OutOfMemoryError):
        sampler.step()
    while sampler.waiting:
        sampler.step()
    assert passes.prefilled == [2048, 2048, 384]


def check(layout: Layout, tokens: Sequence[NextToken], slots: int, even: int, fewest: int) -> None:
    """Each token's row and slot by themselves."""
    ids_R, places_R, slots_R, rows_S, places_S = np.split(layout.columns, np.cumsum(layout.sizes)[:-1])
    owners = np.full(len(ids_R), -1)
    for adapter, start, stop in layout.segments:
        assert (stop - start) % even == 0 and (even == 1 or stop - start >= FEW)
        owners[start:stop] = adapter
    for token, row in zip(tokens, layout.wanted, strict=True):
        assert (ids_R[row], places_R[row], slots_R[row]) == (token.id, token.place, token.slot)
        assert (rows_S[token.slot], places_S[token.slot]) == (row, token.place)
        assert owners[row] == token.adapter
    free = [slot for slot in range(slots) if slot not in slots_R]
    assert len(set(layout.wanted)) == len(tokens) and not places_S[free].any()
    assert len(ids_R) >= fewest and layout.places == max(token.place for token in tokens) + 1


@pytest.mark.parametrize(("even", "fewest"), [(1, 1), (1, 32), (8, 32)])
def test_rows_are_put_in_order_once_for_the_samples_that_run(even: int, fewest: int) -> None:
    generator = np.random.default_rng(even + fewest)
    slots = generator.permutation(24)[:19].tolist()
    tokens = [NextToken(7 * at, int(generator.integers(-1, 3)), slot, 5 * at) for at, slot in enumerate(slots)]
    before = _order.cache_info().misses
    for turn in range(9):
        if turn in (3, 6):
            tokens = tokens[1:]
        check(lay_out(tokens, 24, even, fewest), tokens, 24, even, fewest)
        tokens = [one._replace(id=(one.id * 31 + turn) % V, place=one.place + 1) for one in tokens]
    assert _order.cache_info().misses - before == 3


def expected(logits: np.ndarray, request: SampleRequest, u: float) -> int:
    """The token of one row, by numpy."""
    if request.temperature == 0:
        return int(logits.argmax())
    p = np.exp(logits / request.temperature - (logits / request.temperature).max())
    order = np.argsort(-p)[: request.top_k or None]
    before = np.cumsum(p[order]) / p[order].sum() - p[order] / p[order].sum()
    kept = np.zeros_like(p)
    own = order[(before < request.top_p) | (np.arange(len(order)) == 0)]
    kept[own] = p[own]
    return int(np.searchsorted(np.cumsum(kept), u * kept.sum(), side="right"))


@pytest.mark.parametrize("rules", [RULES, RULES[1:6], RULES[:1]], ids=["mixed", "drawn", "greedy"])
def test_rows_of_all_rules_are_drawn_as_numpy_draws_each(rules: list[dict[str, Any]]) -> None:
    """More rows than are in memory at once; of one that is not finite only this is known."""
    generator = np.random.default_rng(3)
    R = drawing.ROWS + 20
    logits, uniforms = 3 * generator.standard_normal((R, V)), generator.random(R)
    logits[9, 4], logits[70, 5] = np.nan, np.inf
    requests = [SampleRequest((1,), **rules[at % len(rules)], entropy=at % 3 > 0) for at in range(R)]
    logits[10, 6] = -np.inf  # as of a token that a generation setting leaves out
    ids, logprobs, _, entropies = draw(torch.from_numpy(logits), requests, uniforms.tolist())
    for row, request in enumerate(requests):
        if row in (9, 70):
            assert np.isnan(logprobs[row])
            continue
        heated = logits[row] / (request.temperature or 1.0)
        assert ids[row] == expected(logits[row], request, uniforms[row])
        logp = heated - np.log(np.exp(heated).sum())
        assert logprobs[row] == pytest.approx(logp[ids[row]], rel=1e-12)
        if request.entropy:
            kept = logp[np.isfinite(logp)]
            assert entropies[row] == pytest.approx(-(np.exp(kept) * kept).sum(), rel=1e-12)
    assert [found is None for found in entropies] == [not request.entropy for request in requests]


def test_sums_of_blocks_give_rows_of_nan_a_token_of_the_vocabulary() -> None:
    """An index beyond it ends a process on a GPU."""
    logp, u = torch.randn(3, 700).log_softmax(-1), torch.full((3,), 0.5, dtype=torch.float64)
    want = inverse_in_blocks(logp, u)
    logp[1] = float("nan")
    got = inverse_in_blocks(logp, u)
    assert 0 <= int(got[1]) < 700 and got[::2].tolist() == want[::2].tolist()


class OverAll(TorchDispatchMode):
    """Operators that read or write a tensor of all rows and the vocabulary, other than views."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.found = numbers, list[str]()

    def __torch_dispatch__(self, operator: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        out = operator(*given, **(named or {}))
        both = [one for one in torch.utils._pytree.tree_leaves((given, named, out)) if isinstance(one, torch.Tensor)]
        name = operator._schema.name.removeprefix("aten::")
        if any(one.numel() >= self.numbers for one in both) and not operator.is_view and "empty" not in name:
            self.found.append(name)
        return out


@pytest.mark.parametrize(
    ("temperature", "entropy", "most"), [(0.0, False, 3), (1.0, False, 6), (0.7, False, 6), (0.7, True, 10)]
)
def test_drawing_goes_over_the_vocabulary_few_times(
    temperature: float, entropy: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where each is a launch that moves all probabilities of the rows."""
    monkeypatch.setattr(drawing, "_inverse", inverse_in_blocks)
    logits = torch.randn(8, 4096, dtype=torch.bfloat16)
    with OverAll(logits.numel()) as over:
        draw(logits, [SampleRequest((1,), temperature=temperature, entropy=entropy)] * 8, [0.5] * 8)
    assert len(over.found) <= most, over.found
