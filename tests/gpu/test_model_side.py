"""What surrounds the adapters, on a GPU: one attention call for all samples, the loss without logits, liger's kernels.

make gpu
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import FAMILIES, TINY, tiny_model

from packlora.ops.attention.attention import packed_attention, uses_kernels
from packlora.ops.attention.by_sample import visible
from packlora.ops.cross_entropy.linear_cross_entropy import linear_cross_entropy
from packlora.ops.cross_entropy.parts import part_sums, write_gradient
from packlora.ops.cross_entropy.reference import IGNORE
from packlora.ops.cross_entropy.softmax import softmax_gradient

LENGTHS = (100, 257, 3, 64, 1, 500)
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# --- attention ---------------------------------------------------------------------------------------------------------


def operands(
    dtype: torch.dtype, D: int = 64, groups: int = 4, lengths: tuple[int, ...] = LENGTHS
) -> list[torch.Tensor]:
    """q, k, v as a model gives them: [H, T, D], each a transposed view of [T, H, D]."""
    return [
        torch.randn(sum(lengths), heads, D, device="cuda").to(dtype).transpose(0, 1).requires_grad_()
        for heads in (2 * groups, 2, 2)
    ]


def with_gradients(
    function: Callable[..., torch.Tensor], qkv: list[torch.Tensor], dy: torch.Tensor, *rest: Any
) -> list[torch.Tensor]:
    y = function(*qkv, *rest)
    return [y, *torch.autograd.grad(y, qkv, dy.to(y.dtype))]


def written_out(
    q: Any, k: Any, v: Any, lengths: Any, scale: float, window: int | None = None, cap: float | None = None
) -> torch.Tensor:
    """One masked softmax over all tokens."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
    mask = visible(len(owner), window, owner.device) & (owner[:, None] == owner[None])
    groups = len(q) // len(k)
    scores = q @ k.repeat_interleave(groups, 0).transpose(1, 2) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    return (torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ v.repeat_interleave(groups, 0)).transpose(0, 1)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (1, None), (17, None), (400, None), (None, 5.0), (17, 30.0)])
@pytest.mark.parametrize(("D", "groups"), [(64, 4), (80, 2), (128, 1), (128, 4), (16, 3), (256, 2)])
@pytest.mark.parametrize("dtype", HALF)
def test_attention_and_its_gradients_are_as_exact_as_plain_torch(
    dtype: torch.dtype, D: int, groups: int, window: int | None, cap: float | None
) -> None:
    qkv = operands(dtype, D, groups)
    dy = torch.randn(sum(LENGTHS), 2 * groups, D, device="cuda").to(dtype)
    assert uses_kernels(qkv[0], qkv[2])
    got = with_gradients(packed_attention, qkv, dy, LENGTHS, D**-0.5, window, cap)
    plain = with_gradients(written_out, qkv, dy, LENGTHS, D**-0.5, window, cap)
    exact = [tensor.detach().double().requires_grad_() for tensor in qkv]
    want = with_gradients(written_out, exact, dy.double(), LENGTHS, D**-0.5, window, cap)
    # A token that sees itself alone has dq = dk = 0 exactly where all is written out; the backward of kernels takes the
    # difference of two float32 sums of D products there, whose own rounding is the floor.
    floor = 1e-6 if window != 1 else D * float(qkv[2].abs().max() * dy.abs().max()) * 2**-24
    for index, (ours, theirs, value) in enumerate(zip(got, plain, want, strict=True)):
        error, bound = (ours.double() - value).abs().max(), (theirs.double() - value).abs().max()
        assert error <= 2 * bound + floor, f"{index}: {float(error):.3g} against {float(bound):.3g}"


@pytest.mark.parametrize("dtype", HALF)
def test_attention_gives_the_same_bits_every_time(dtype: torch.dtype) -> None:
    lengths = (2000, 1500, 4000, 692)
    qkv = operands(dtype, 128, 4, lengths)
    dy = torch.randn(sum(lengths), 8, 128, device="cuda").to(dtype)
    first = with_gradients(packed_attention, qkv, dy, lengths, 0.1)
    for _ in range(5):
        assert all(
            torch.equal(a, b)
            for a, b in zip(first, with_gradients(packed_attention, qkv, dy, lengths, 0.1), strict=True)
        )


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("dtype", HALF)
def test_what_is_packed_beside_a_sample_changes_no_bit_of_it_not_even_a_nan(
    dtype: torch.dtype, window: int | None
) -> None:
    """Forward and every gradient; the others are replaced, then NaN, then infinite, at the same places."""
    qkv, others = operands(dtype), operands(dtype)
    dy, other_dy = (torch.randn(sum(LENGTHS), 8, 64, device="cuda").to(dtype) for _ in range(2))
    first = with_gradients(packed_attention, qkv, dy, LENGTHS, 0.125, window)
    start = 0
    for length in LENGTHS:
        own = slice(start, start + length)
        for fill in (None, math.nan, math.inf):
            mixed = []
            for tensor, other in zip((*qkv, dy.transpose(0, 1)), (*others, other_dy.transpose(0, 1)), strict=True):
                new = other.detach().clone() if fill is None else torch.full_like(other, fill)
                new[:, own] = tensor.detach()[:, own]
                mixed.append(new)
            leaves = [tensor.requires_grad_() for tensor in mixed[:3]]
            got = with_gradients(packed_attention, leaves, mixed[3].transpose(0, 1), LENGTHS, 0.125, window)
            assert torch.equal(got[0][own], first[0][own]), (length, fill)
            for a, b in zip(got[1:], first[1:], strict=True):
                assert torch.equal(a[:, own], b[:, own]), (length, fill)
        start += length


# --- the loss ----------------------------------------------------------------------------------------------------------


def plain_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = hidden @ weight.T
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction="none", ignore_index=IGNORE)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("L", "D", "V"), [(16, 64, 320), (1000, 256, 50257), (700, 128, 128256)])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_the_fused_loss_is_as_exact_as_logits_and_cross_entropy(dtype: torch.dtype, L: int, D: int, V: int) -> None:
    hidden = torch.randn(L, D, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(V, D, device="cuda") / D**0.5).to(dtype)
    labels = torch.randint(V, (L,), device="cuda")
    labels[::7] = IGNORE
    weights = torch.rand(L, device="cuda") + 0.1
    for chunk_bytes in (None, 100 * V * 6):
        losses, total = linear_cross_entropy(hidden, weight, None, labels, weights, chunk_bytes)
        (gradient,) = torch.autograd.grad(total, hidden)
        again, total = linear_cross_entropy(hidden, weight, None, labels, weights, chunk_bytes)
        assert torch.equal(losses, again) and torch.equal(gradient, torch.autograd.grad(total, hidden)[0])
        theirs = plain_loss(hidden, weight, labels)
        (their_gradient,) = torch.autograd.grad(theirs, hidden, weights)
        exact = hidden.detach().double().requires_grad_()
        want = plain_loss(exact, weight.double(), labels)
        (want_gradient,) = torch.autograd.grad(want, exact, weights.double())
        for a, b, c in ((losses, theirs, want), (gradient, their_gradient, want_gradient)):
            assert (a.double() - c).abs().max() <= 2 * (b.double() - c).abs().max() + 1e-6
        assert (losses[::7] == 0).all() and (gradient[::7] == 0).all()


def places(half: torch.Tensor) -> torch.Tensor:
    """Numbers in 16 bits by rank: neighbours differ by one."""
    bits = half.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("V", [1, 33, 4096, 9001, 128256])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_the_kernel_does_what_the_torch_path_does_also_with_nan_infinity_and_unknown_labels(
    dtype: torch.dtype, V: int
) -> None:
    logits = (3 * torch.randn(40, V, device="cuda")).to(dtype)
    labels, weights = torch.randint(V, (40,), device="cuda"), torch.rand(40, device="cuda")
    logits[3], labels[3] = math.nan, IGNORE
    logits[4, V // 2] = math.nan
    logits[5, : V // 2], labels[5] = -math.inf, V - 1
    labels[6], labels[7] = V, -1
    for gradient in (False, True):
        on_gpu, on_cpu = logits.clone(), logits.cpu()
        got = softmax_gradient(on_gpu, labels, weights, gradient)
        want = softmax_gradient(on_cpu, labels.cpu(), weights.cpu(), gradient)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5, equal_nan=True)
        if gradient:
            near_zero = (on_gpu.cpu().float() - on_cpu.float()).abs() <= 1e-6
            if dtype == torch.float32:
                torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-6, atol=1e-6, equal_nan=True)
            else:  # one unit in the last place
                both_nan = on_gpu.cpu().isnan() & on_cpu.isnan()
                assert ((places(on_gpu.cpu()) - places(on_cpu)).abs() <= 1).logical_or(near_zero | both_nan).all()
        else:
            torch.testing.assert_close(on_gpu, logits, rtol=0, atol=0, equal_nan=True)


def test_the_fused_loss_needs_no_memory_for_the_logits_of_all_rows() -> None:
    L, D, V = 8192, 256, 128256
    hidden = torch.randn(L, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, D, device="cuda", dtype=torch.bfloat16) / 16
    labels = torch.randint(V, (L,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, None, labels)[1].backward()
    assert torch.cuda.max_memory_allocated() - before < 0.4 * 2**30  # the logits alone are 2 GiB


# --- whole models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_loaded_on_the_fast_path(family: str, dtype: str, tiny_base: Any) -> None:
    pytest.importorskip("liger_kernel")
    from packlora.base.model import load_base
    from packlora.config import Run

    attentions = 1 if family == "qwen3_5" else 2  # of its two layers one is linear attention
    jobs = [{"name": "x", "data": {"path": "x"}}]
    tree = {"base_model": tiny_base(family), "output_dir": "x", "device": "cuda", "dtype": dtype, "jobs": jobs}
    for setting in (True, "auto"):
        for checkpointing in (False, True):
            run = Run.model_validate(tree | {"liger": setting, "gradient_checkpointing": checkpointing})
            base = load_base(run, None)
            assert base.fused_loss == (family != "gemma2")
            assert not base.warnings
            ends = {name[-3:]: int(name.split()[0]) for name in base.liger}
            assert (ends["ion"], ends["MLP"], len(ends)) == (attentions, 2, 3), base.liger
    assert load_base(Run.model_validate(tree | {"liger": False}), None).liger == []


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_adapter_gradients_with_liger_are_those_without(family: str, dropout: float) -> None:
    """LoRA and DoRA, with and without dropout, in float32, beside float64: liger's kernels overwrite what the layers gave them.
    Layers that are not overwritten may keep outputs in the place of DoRA's product all the same; with dropout none can."""
    pytest.importorskip("liger_kernel")
    from packed import PackedSample, parts
    from peft import LoraConfig

    from packlora.adapters.attach import attach
    from packlora.adapters.spec import resolve
    from packlora.base.liger import use_liger
    from packlora.base.packing import prepare_model
    from packlora.data.encode import Sample
    from packlora.engine.collate import collate
    from packlora.engine.heads import token_losses
    from packlora.runtime.keep_outputs import keep_outputs

    packed = []
    for number, length in enumerate((30, 41, 80, 60, 7, 25)):
        ids, is_label = np.random.randint(3, TINY["vocab_size"], length).astype(np.int32), np.random.rand(length) < 0.7
        is_label[0], is_label[-1] = False, True
        owner = number // 2
        packed.append(PackedSample(owner, Sample(ids, is_label), number, 0, None if owner == 0 else 11 + owner))
    batch = collate(parts(packed), torch.device("cuda"))
    results = []
    for dtype, setting, keep in (
        (torch.float64, False, False), (torch.float32, False, False), (torch.float32, True, False), (torch.float32, True, True),
    ):  # fmt: skip
        model = tiny_model(family).to("cuda", dtype)
        prepare_model(model, False)
        assert bool(use_liger(model, setting)) == setting
        kinds: list[dict[str, Any]] = [{}, {"use_dora": True}, {"use_dora": True, "lora_dropout": dropout}]
        specs = {
            str(index): resolve(
                LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **kind), model, str(index)
            )
            for index, kind in enumerate(kinds)
        }
        attached, adapters = attach(model, specs, 0)
        parameters = [p for adapter in adapters for p in adapter.named_parameters().values()]
        with torch.no_grad():
            for index, parameter in enumerate(parameters):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)).cuda() / 16
                parameter.data = parameter.to(dtype) + noise.to(dtype)
        if keep:
            found = keep_outputs(model)
            kept = {path.rpartition(".")[2] for path, m in model.named_modules() if getattr(m, "keep_output", False)}
            assert ("down_proj" in kept) == (dropout == 0), found
            assert not kept & {"gate_proj", "up_proj"}, found
        with attached.active(batch.owners):
            losses, total, _ = token_losses(model, batch, fused=family != "gemma2")
            results.append([losses, *torch.autograd.grad(total, parameters)])
    exact, *narrow = results
    plain, *with_liger = (
        max(float((one - true).abs().max() / true.abs().max()) for one, true in zip(found, exact, strict=True))
        for found in narrow
    )
    assert max(with_liger) < 1e-4 + 4 * plain, "linear attention may lose 2e-4 without liger"


def test_a_run_says_what_it_used(tiny_base: Any, write_rows: Any, tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    from test_training import config, train

    run = config(tiny_base(), tmp_path / "out", write_rows, dtype="bfloat16", device="cuda", liger=True)
    run["jobs"][0].setdefault("adapter", {})["use_dora"] = True
    run["keep_outputs"] = True
    train(run)
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["model"]["kept_outputs"].startswith("DoRA: ")
    assert record["model"]["loss"] == "fused"
    assert sorted(record["model"]["liger"]) == ["2 LlamaAttention", "2 LlamaMLP", "5 LlamaRMSNorm"]
    assert "liger-kernel" in record["versions"]


@pytest.mark.parametrize("V", [1, 33, 4096, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_kernels_over_a_part_of_the_vocabulary_do_what_the_torch_path_does(dtype: torch.dtype, V: int) -> None:
    logits = (3 * torch.randn(40, V, device="cuda")).to(dtype)
    here, weights = torch.randint(-V, 2 * V, (40,), device="cuda"), torch.rand(40, device="cuda")
    ignored = torch.arange(40, device="cuda") == 3
    logits[3] = math.nan
    logits[5, : V // 2] = -math.inf
    found, want = part_sums(logits, here, torch.float32), part_sums(logits.cpu(), here.cpu(), torch.float32)
    torch.testing.assert_close(found.cpu(), want, rtol=1e-5, atol=1e-5, equal_nan=True)
    sums = want[0].nan_to_num(0.0) + 1
    on_gpu, on_cpu = logits.clone(), logits.cpu()
    write_gradient(on_gpu, here, weights, sums.cuda(), ignored)
    write_gradient(on_cpu, here.cpu(), weights.cpu(), sums, ignored.cpu())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=tolerance, atol=1e-5, equal_nan=True)
