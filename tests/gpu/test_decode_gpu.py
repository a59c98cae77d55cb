"""Sampling by CUDA graphs of decode passes on a GPU: the tokens and log-probabilities of passes without graphs.

make gpu
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cached_cases import REAL, attended, drawn
from conftest import tiny_model
from exactness import assert_as_exact
from peft import LoraConfig
from sampling_cases import prompt
from seeds import SEED

from packlora.adapters.attach import Adapter, attach
from packlora.adapters.linear import Attached
from packlora.adapters.spec import resolve
from packlora.base import kv_cache
from packlora.base.packing import prepare_model
from packlora.engine.generate import Sampler, sample
from packlora.engine.recorded_decode import UNRECORDED, GraphedPasses
from packlora.engine.sampling import SampledToken, SampleRequest
from packlora.runtime.run import deterministic

NEW = 40
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4}, "dora": {"r": 8, "use_dora": True}, "some": {"r": 16, "target_modules": ["q_proj", "down_proj"]},
}  # fmt: skip


def adapted(names: tuple[str, ...]) -> tuple[Any, Attached, list[Adapter]]:
    model = tiny_model("llama", torch.bfloat16).to("cuda")
    prepare_model(model, False)
    if not names:
        return model, Attached([]), []
    more = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}
    attached, adapters = attach(
        model, {name: resolve(LoraConfig(**more | KINDS[name]), model, name) for name in names}, 0
    )
    torch.manual_seed(0)
    for adapter in adapters:
        for parameter in adapter.named_parameters().values():
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model, attached, adapters


@pytest.fixture(params=[False, True], ids=["", "deterministic"])
def torch_as_in_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch as a run has it, which must be deterministic, and as it is by itself."""
    with deterministic() if request.param else nullcontext():
        yield


@pytest.mark.usefixtures("torch_as_in_runs")
@pytest.mark.parametrize("names", [("lora", "dora", "some"), ("lora",), ()], ids=["three", "one", "none"])
def test_graphs_draw_what_passes_without_draw(names: tuple[str, ...]) -> None:
    """Over rows that enter and leave, and adapters that step in between; log-probabilities within the dtype's rounding."""
    model, attached, adapters = adapted(names)
    count = len(names) + (len(names) != 1)  # the base model beside several
    requests = [
        SampleRequest(prompt(at, 5 + at), at % count - (len(names) != 1), NEW - 5 * (at % 3), temperature=0.0)
        for at in range(7)
    ]

    def drawn(graphs: bool) -> tuple[Sampler, list[SampledToken]]:
        sampler = Sampler(model, attached, rows=4, graphs=graphs)
        found = [token for samples in sample(sampler, requests) for token in samples[0]]
        for adapter in adapters:
            adapter.flat.mul_(1.1)
        found += [token for samples in sample(sampler, requests) for token in samples[0]]
        for adapter in adapters:
            adapter.flat.div_(1.1)
        return sampler, found

    _, plain = drawn(False)
    sampler, graphed = drawn(True)
    passes = sampler._passes
    assert isinstance(passes, GraphedPasses) and passes.why_not is None
    assert any(body._replay is not None for body in passes._bodies.values())
    is_same, compared = True, 0
    for at, (one, other) in enumerate(zip(plain, graphed, strict=True)):
        is_same |= at == 0 or plain[at - 1].reason is not None  # a new sample
        if is_same:  # greedy tokens part where two are as likely; then prompts are others
            assert abs(one.logprob - other.logprob) < 0.05
            compared += 1
        is_same &= one.id == other.id
    assert compared > len(plain) / 2


@pytest.mark.usefixtures("torch_as_in_runs")
@pytest.mark.parametrize("names", [("lora", "dora", "some"), ("lora",), ()], ids=["three", "one", "none"])
@pytest.mark.parametrize("length", [9, 90], ids=["few rows", "many rows"])
def test_prompts_by_graphs_have_the_logprobs_of_passes_without(names: tuple[str, ...], length: int) -> None:
    """The first passes of a size, the recording and replays; then other lengths and slots, after adapters have stepped."""
    model, attached, adapters = adapted(names)
    count = len(names) + (len(names) != 1)  # the base model beside several
    plain, sampler = (Sampler(model, attached, rows=8, graphs=graphs) for graphs in (False, True))
    passes = sampler._passes
    assert isinstance(passes, GraphedPasses)
    for turn in range(6):
        for adapter in adapters:
            adapter.flat.mul_(1.1 if turn % 2 else 1 / 1.1)
        lengths = [length + (turn % 3) * (1 - 2 * (at % 2)) for at in range(8)]
        requests = [
            SampleRequest(prompt(8 * turn + at, own), at % count - (len(names) != 1), 2, temperature=0.0)
            for at, own in enumerate(lengths)
        ]
        for one, other in zip(sample(plain, requests), sample(sampler, requests), strict=True):
            assert abs(one[0][0].logprob - other[0][0].logprob) < 0.05
            if one[0][0].id == other[0][0].id:  # what the prompt left in the cache
                assert abs(one[0][1].logprob - other[0][1].logprob) < 0.05
    assert passes.why_not is None and passes.prompts.why_not is None
    assert [body._replay is not None for body in passes.prompts._bodies.values()] == [True]


@pytest.mark.parametrize(
    "how", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}], ids=str
)
def test_a_pass_waits_for_the_device_once_when_its_tokens_are_read(how: dict[str, float]) -> None:
    """Beside greedy samples. A wait before that would have the device idle while the host asks for what draws."""
    model, attached, _ = adapted(("lora", "dora"))
    sampler = Sampler(model, attached, rows=8)
    for at in range(8):
        more: dict[str, Any] = how if at % 4 else {"temperature": 0.0}
        sampler.submit(SampleRequest(prompt(at, 9), at % 2, NEW, seed=at, **more))
    for _ in range(UNRECORDED + 4):
        sampler.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            tokens = sampler.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(sampler._passes, GraphedPasses) and sampler._passes.why_not is None
    waits = [str(one.message) for one in found if "called a synchronizing" in str(one.message)]
    assert len(tokens) == 8 and len(waits) == 1, waits


def test_an_adapter_that_is_not_finite_ends_its_own_samples_alone() -> None:
    """By blocks of the vocabulary, whose sums are then NaN: an index beyond them would end the process."""
    model, attached, adapters = adapted(("lora", "dora"))
    sampler = Sampler(model, attached, rows=8)
    own = {sampler.submit(SampleRequest(prompt(at, 9), at % 2, 12, seed=at)): at % 2 for at in range(8)}
    sampler.step()
    adapters[1].flat.fill_(float("nan"))
    for token in sampler.step():
        assert (token.reason == "not finite") == (own[token.ticket] == 1)
    while sampler.waiting:
        assert all(own[token.ticket] == 0 and token.reason != "not finite" for token in sampler.step())
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("H", "h", "D", "window", "cap", "sinks"),
    [(16, 8, 128, None, None, False), (14, 2, 64, None, None, True), (8, 4, 256, 65, 30.0, False), (9, 3, 80, 17, None, False)],
)  # fmt: skip
def test_attention_of_new_tokens_is_as_exact_as_by_torch(
    H: int, h: int, D: int, window: int | None, cap: float | None, sinks: bool, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    how = D**-0.5, window, cap, torch.linspace(-1, 4, H, device="cuda") if sinks else None

    def draw(seed: int) -> Any:
        narrow = [tensor.to("cuda", dtype) for tensor in drawn(H, h, D, seed)]
        got = attended(narrow, *how)
        with monkeypatch.context() as patch:
            patch.setattr(kv_cache, "uses_kernels", lambda q, v: False)
            torchs, want = attended(narrow, *how), attended([tensor.double() for tensor in narrow], *how)
        assert torch.equal(got["k"], torchs["k"]) and torch.equal(got["v"], torchs["v"])
        return tuple({"y": one["y"][:REAL]} for one in (got, torchs, want))

    assert_as_exact(draw, draws=3, seed=SEED)
