"""The same claims on a GPU: exactness of the operator, isolation, a job as if alone, determinism, resuming.

make gpu
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, TINY, tiny_model
from exactness import assert_as_exact
from group_cases import by_group
from steps import after_microbatch, terminate

from packlora.ops.attention.attention import packed_attention
from packlora.ops.dropout.keys import dropped, layer_salt, token_keys
from packlora.ops.lora_linear import reference
from packlora.ops.lora_linear.reference import ReferenceSegment
from packlora.ops.row_norm.reference import weight_norm
from packlora.tune.timing import MORE_ROUNDS, Contender, Work, paired


def test_dropout_masks_are_those_of_the_cpu() -> None:
    keys = torch.from_numpy(token_keys(5, 1, 2, 300))
    on_cpu = dropped(keys, layer_salt("x"), 1001, 0.1)
    assert torch.equal(on_cpu, dropped(keys.cuda(), layer_salt("x"), 1001, 0.1).cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_chain_is_as_exact_as_plain_torch_in_the_same_dtype(dtype: torch.dtype, dora: bool, p: float) -> None:
    """Three ragged segments with gaps; every gradient."""
    assert_as_exact(lambda _: _by_index(dtype, dora, p), 4, torch.initial_seed())


def _by_index(dtype: torch.dtype, dora: bool, p: float) -> tuple[dict[str, torch.Tensor], ...]:
    """The output and each gradient of one draw: ours, torch's and in float64, on the same rounded inputs."""
    generator = torch.Generator(device="cuda").manual_seed(torch.seed() % 2**31)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float64).to(dtype).double()

    T, K, N, r = 1003, 515, 770, 24
    x, weight, dy = randn(T, K), randn(N, K) / K**0.5, randn(T, N)
    weight = weight.to(dtype).double()
    keys = torch.from_numpy(token_keys(1, 2, 3, T)).cuda()
    segments = []
    for start, stop in ((0, 17), (40, 500), (501, 1000)):
        A, B = (randn(r, K) / K**0.5).to(dtype).double(), (randn(N, r) / r**0.5).to(dtype).double()
        norm = weight_norm(weight, A, B, 0.5).to(dtype).double() if dora else None
        magnitude = (norm * (1 + 0.2 * randn(N))).to(dtype).double() if norm is not None else None
        segments.append(ReferenceSegment(start, stop, 0.5, p, A, B, magnitude, norm))

    def run(function: Callable[..., torch.Tensor], to: torch.dtype) -> dict[str, torch.Tensor]:
        leaves = [x.to(to, copy=True).requires_grad_()]
        cast = []
        for seg in segments:
            own = [t if t is None else t.to(to, copy=True).requires_grad_() for t in (seg.A, seg.B, seg.magnitude)]
            leaves += [t for t in own if t is not None]
            norm = None if seg.norm is None else seg.norm.to(to)
            cast.append(ReferenceSegment(seg.start, seg.stop, seg.scaling, seg.dropout, own[0], own[1], own[2], norm))
        y = function(leaves[0], weight.to(to), None, cast, keys, 7)
        results = [y.detach(), *torch.autograd.grad(y, leaves, dy.to(to))]
        return {str(index): value for index, value in enumerate(results)}

    return run(by_group, dtype), run(reference.lora_linear, dtype), run(reference.lora_linear, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_samples_do_not_see_each_other(family: str, dtype: torch.dtype) -> None:
    """Changing every token of the other samples must not change a bit of a sample's logits at the same place."""
    from packlora.base.packing import packed_logits, prepare_model

    model = tiny_model(family, dtype).cuda()
    prepare_model(model, False)
    lengths = (13, 40, 1, 30)
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    generator = torch.Generator().manual_seed(1)
    outputs = []
    own = torch.randint(3, TINY["vocab_size"], (40,), generator=generator)
    for _ in range(2):
        ids = torch.randint(3, TINY["vocab_size"], (sum(lengths),), generator=generator)
        ids[13:53] = own
        with torch.no_grad():
            outputs.append(packed_logits(model, ids.cuda(), positions, lengths, torch.arange(13, 53).cuda()))
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_attention_is_as_exact_as_plain_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator(device="cuda").manual_seed(3)
    lengths, D = (100, 257, 3, 64), 64
    q, k, v = (torch.randn(n, sum(lengths), D, generator=generator, device="cuda").to(dtype) for n in (8, 2, 2))

    def plain(to: torch.dtype) -> torch.Tensor:
        out, start = [], 0
        for n in lengths:
            a, b, c = (
                t[:, start : start + n].to(to) for t in (q, k.repeat_interleave(4, 0), v.repeat_interleave(4, 0))
            )
            mask = torch.ones(n, n, dtype=torch.bool, device="cuda").tril()
            scores = (a @ b.transpose(1, 2) * D**-0.5).masked_fill(~mask, -torch.inf)
            out.append((torch.softmax(scores, -1) @ c).transpose(0, 1))
            start += n
        return torch.cat(out).double()

    want = plain(torch.float64)
    got = packed_attention(q, k, v, lengths, D**-0.5).double()
    assert (got - want).abs().max() <= 2 * (plain(dtype) - want).abs().max() + 1e-6


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-10), ("float32", 1e-5)])
def test_every_job_gives_alone_the_adapter_that_it_gives_beside_others(
    dtype: str, bound: float, tiny_base: Any, write_rows: Any, tmp_path: Path
) -> None:
    from test_training import JOBS, adapter, config, distance, train

    together = config(tiny_base(), tmp_path / "together", write_rows, dtype=dtype, device="cuda")
    train(together)
    for index, job in enumerate(together["jobs"]):
        alone = tmp_path / f"alone-{index}"
        train({**together, "output_dir": str(alone), "jobs": [job], "max_tokens_per_microbatch": 300})
        assert distance(adapter(tmp_path / "together", job["name"]), adapter(alone, job["name"])) < bound, JOBS[index]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_same_run_gives_the_same_bits_also_when_it_is_stopped_and_resumed(
    dtype: str, tiny_base: Any, write_rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_training import config, same_bits, train

    tree = config(tiny_base(), tmp_path / "whole", write_rows, dtype=dtype, device="cuda")
    train(tree)
    train({**tree, "output_dir": str(tmp_path / "again")})
    same_bits(tmp_path / "whole", tmp_path / "again")
    with monkeypatch.context() as patch:
        after_microbatch(patch, 8, terminate)
        assert train({**tree, "output_dir": str(tmp_path / "resumed")}).status == "interrupted"
    train({**tree, "output_dir": str(tmp_path / "resumed")}, resume=True)
    same_bits(tmp_path / "whole", tmp_path / "resumed")


def test_bfloat16_losses_follow_float32_losses(tiny_base: Any, write_rows: Any, tmp_path: Path) -> None:
    from test_training import config, steps, train

    for dtype in ("float32", "bfloat16"):
        train(config(tiny_base(), tmp_path / dtype, write_rows, dtype=dtype, device="cuda"))
    for a, b in zip(steps(tmp_path / "float32"), steps(tmp_path / "bfloat16"), strict=True):
        assert abs(a["loss"] - b["loss"]) < 0.05 * a["loss"]


def test_with_the_host_ahead_the_host_is_not_timed() -> None:
    x = torch.zeros(1000, device="cuda")

    def step() -> (
        None
    ):  # two kernels of microseconds, and 30 ms of the host between them: more than other processes take
        x.add_(1)
        end = time.perf_counter() + 30e-3
        while time.perf_counter() < end:
            pass
        x.add_(1)

    contenders = [Contender("slow host", lambda: Work(step, lambda: None))]
    timing = paired(contenders, x.device, seconds=0, rounds=(5, 5), ahead=True).by_name["slow host"]
    assert timing.error is None and len(timing.ms) == 5 and len(timing.ahead_ms) == MORE_ROUNDS
    assert statistics.median(timing.ms) > 25
    assert statistics.median(timing.ahead_ms) < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_specification_has_all_of_its_gradient_under_dropout(dtype: torch.dtype) -> None:
    """In narrow dtypes too, where masks have a kernel: it is none of autograd's operations."""
    g = torch.Generator().manual_seed(0)
    T, K, N, p = 70, 96, 64, 0.5
    keys = torch.from_numpy(token_keys(1, 0, 0, T)).cuda()
    x, weight, A, B = (
        torch.randn(*s, generator=g, dtype=torch.float64).cuda() for s in ((T, K), (N, K), (4, K), (N, 4))
    )

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        own = x.to(dtype).requires_grad_()
        segment = ReferenceSegment(0, T, 1.5, p, A.to(dtype), B.to(dtype))
        y = reference.lora_linear(own, weight.to(dtype), None, [segment], keys, 7)
        return torch.autograd.grad(y.sum(), own)[0].double()

    want = gradient(torch.float64)
    assert float((gradient(dtype) - want).norm() / want.norm()) < 0.02
