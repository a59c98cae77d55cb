"""Which parts of a model fused norms and liger are given, with stand-ins for liger's kernels: the kernels themselves need a GPU
(tests/gpu)."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model

from packlora.adapters.kept_outputs import is_on_liger
from packlora.base import liger
from packlora.base.packing import packed_logits, prepare_model
from packlora.errors import InputError
from packlora.ops.modules import remove_hooks
from packlora.ops.recompute import RecomputeHooks, recompute_of, recomputed
from packlora.ops.recompute_hooks import add_recompute
from packlora.ops.rms_norm import rms_norm as operator
from packlora.ops.rms_norm.rms_norm import rms_norm

CALLS: list[str] = []
SERVED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
"""Families whose norms, rotations and gates are all such as liger has."""


class _SiLU:
    @staticmethod
    def apply(a: Any, b: Any) -> Any:
        CALLS.append("gated")
        return F.silu(a) * b


class _GELU:
    @staticmethod
    def apply(a: Any, b: Any) -> Any:
        CALLS.append("gated")
        return F.gelu(a, approximate="tanh") * b


class _Rope:
    @staticmethod
    def apply(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any, unsqueeze_dim: int) -> Any:
        CALLS.append("rotary")
        half = q.shape[-1] // 2
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple((x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin).to(x.dtype) for x in (q, k))


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A liger_kernel.ops in plain torch, allowed on the CPU; calls of the fused norm are counted."""

    def norm(*args: Any) -> torch.Tensor:
        CALLS.append("norm")
        return rms_norm(*args)

    ops = types.ModuleType("liger_kernel.ops")
    ops.LigerSiLUMulFunction = _SiLU  # type: ignore[attr-defined]
    ops.LigerGELUMulFunction, ops.LigerRopeFunction = _GELU, _Rope  # type: ignore[attr-defined]
    monkeypatch.setattr(liger, "rms_norm", norm)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)
    monkeypatch.setattr(liger, "check_liger", lambda setting, device, dtype: setting is not False)
    return ops


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(25), torch.arange(15)])
    with torch.no_grad():
        return packed_logits(model, ids, positions, (25, 15), torch.arange(40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SERVED)
def test_every_norm_rotation_and_gate_of_the_families_is_taken_over_and_the_logits_stay(
    family: str, dtype: torch.dtype
) -> None:
    model = tiny_model(family, dtype)
    prepare_model(model, False)
    want = logits(model)
    replaced = liger.use_liger(model, True)
    norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    counts = {name.split()[1]: int(name.split()[0]) for name in replaced}
    of = {
        end: sum(count for name, count in counts.items() if name.endswith(end))
        for end in ("RMSNorm", "Attention", "MLP")
    }
    assert (of, len(counts)) == ({"RMSNorm": norms, "Attention": 2, "MLP": 2}, 3)
    CALLS.clear()
    got = logits(model)
    assert (CALLS.count("norm"), CALLS.count("rotary"), CALLS.count("gated")) == (norms, 2, 2)
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < (1e-5 if dtype == torch.float32 else 0.02)


def test_a_forward_within_decorators_is_taken_over_and_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    prepare_model(model, False)
    want = logits(model)
    heard: list[str] = []

    def told(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            heard.append(name)
            return function(*args, **kwargs)

        return call

    kind = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(kind, "forward", told("outer", told("inner", kind.forward)))
    assert f"2 {kind.__name__}" in liger.use_liger(model, True)
    CALLS.clear()
    torch.testing.assert_close(logits(model), want, rtol=1e-5, atol=1e-5)
    assert (CALLS.count("rotary"), heard) == (2, ["outer", "inner"] * 2)
    assert is_on_liger(model.model.layers[0].self_attn)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("LigerSiLUMulFunction", lambda apply: lambda *args: apply(*args) + 0.1),
        ("LigerRopeFunction", lambda apply: lambda q, k, cos, sin, *rest: apply(q, k, cos, -sin, *rest)),
    ],
)
def test_a_kernel_that_computes_something_else_is_not_used(
    name: str, change: Any, kernels: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    prepare_model(model, False)
    want = logits(model)
    original = getattr(kernels, name)
    wrong = type("Wrong", (), {"apply": staticmethod(change(original.apply))})
    monkeypatch.setattr(kernels, name, wrong)
    replaced = liger.use_liger(model, "auto")
    assert len(replaced) == 2
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)


def test_a_norm_that_gives_other_values_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    prepare_model(model, False)
    monkeypatch.setattr(liger, "rms_norm", lambda *args: rms_norm(*args) * 1.01)
    assert not any(name.endswith("RMSNorm") for name in liger.use_liger(model, "auto"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_gives_another_gradient_is_not_used(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its values are right."""
    backward = operator._backward
    monkeypatch.setattr(operator, "_backward", lambda *args: backward(*args) * 1.03)
    model = tiny_model("gemma", dtype)
    prepare_model(model, False)
    assert not any(name.endswith("RMSNorm") for name in liger.use_liger(model, "auto"))


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_norms_that_the_operator_does_not_compute_are_left_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is trained, then or later; rows too wide; hidden states of another dtype than the weight."""
    model = tiny_model(family)
    assert not any(name.endswith("RMSNorm") for name in liger.use_liger(model, "auto"))  # nothing is frozen
    prepare_model(model, False)
    with monkeypatch.context() as patch:
        patch.setattr(liger, "WIDEST", 63)
        assert not any(name.endswith("RMSNorm") for name in liger.use_liger(model, "auto"))
    assert any(name.endswith("RMSNorm") for name in liger.use_liger(model, "auto"))
    norm = model.model.norm
    own, x = type(norm).forward, torch.randn(3, 64)
    CALLS.clear()
    torch.testing.assert_close(norm(x), own(norm, x))
    assert CALLS == ["norm"]
    assert torch.equal(norm(x.bfloat16()), own(norm, x.bfloat16()))
    norm.weight.requires_grad_()
    (gradient,) = torch.autograd.grad(norm(x).sum(), norm.weight)
    assert gradient.any()
    assert CALLS == ["norm"]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_norms_that_were_taken_over_are_recomputed(family: str) -> None:
    model = tiny_model(family)
    prepare_model(model, False)
    norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    said, left = add_recompute(model)
    want = said, {path for path in left if "norm" in path}
    remove_hooks(model, RecomputeHooks)
    liger.use_liger(model, True)
    said, left = add_recompute(model)
    assert (said, {path for path in left if "norm" in path}) == want
    assert said.startswith(f"{norms} norms")
    x = torch.randn(5, 64, requires_grad=True)
    y = model.model.norm(x)
    recompute = recompute_of(y)
    assert recompute is not None
    CALLS.clear()
    assert torch.equal(recomputed(recompute.function, recompute.operands), y)
    assert CALLS == ["norm"]


def test_a_model_with_nothing_for_liger_is_left_alone_or_refused() -> None:
    import transformers

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=320, attn_implementation="eager")
    )
    prepare_model(model, False)
    assert liger.use_liger(model, "auto") == []
    with pytest.raises(InputError, match="nothing for a gpt2 model"):
        liger.use_liger(model, True)


def test_what_must_be_there_and_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="liger: true cannot be met: liger-kernel is not installed"):
        liger.check_liger(True, gpu, "bfloat16")
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(InputError, match="this run is on cpu"):
        liger.check_liger(True, cpu, "bfloat16")
    with pytest.raises(InputError, match="not enough for float64"):
        liger.check_liger(True, gpu, "float64")
    assert [liger.check_liger("auto", device, "float32") for device in (cpu, gpu)] == [False, True]
    assert not liger.check_liger("auto", gpu, "float64")
    assert not liger.check_liger(False, gpu, "float32")
