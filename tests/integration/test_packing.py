"""Packed samples do not see each other, on every attention path: all families, windows, softcap, checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import FAMILIES, TINY, tiny_model

from packlora.base.packing import packed_logits, prepare_model
from packlora.ops.attention.attention import packed_attention
from packlora.ops.attention.by_sample import visible

LENGTHS = (13, 1, 40, 7, 22)


def samples(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, TINY["vocab_size"], (length,), generator=generator) for length in LENGTHS]


def pack(model: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    ids, positions = torch.cat(parts), torch.cat([torch.arange(len(part)) for part in parts])
    return packed_logits(model, ids, positions, [len(part) for part in parts], torch.arange(len(ids)))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_packed_sample_are_those_of_the_untouched_model_on_the_sample_alone(
    family: str, checkpointing: bool
) -> None:
    """Against transformers' own eager attention, one sample at a time, before packlora touches the model. In float64, where
    what is left is that the models compute norms and softmax in float32."""
    model, parts = tiny_model(family, torch.float64), samples()
    alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in parts]
    swapped = model(input_ids=torch.cat(parts)[None], use_cache=False).logits[0, LENGTHS[0] :][: LENGTHS[1] + 5]
    assert (swapped[:1] - alone[1]).abs().max() > 1e-3  # the samples would matter to each other
    prepare_model(model, checkpointing)
    packed = pack(model, parts)
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_of_one_samples_loss_reaches_no_other_sample(family: str) -> None:
    model, parts = tiny_model(family), samples()
    prepare_model(model, False)
    embedded = model.get_input_embeddings()(torch.cat(parts))[None].detach().requires_grad_()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    start, stop = sum(LENGTHS[:2]), sum(LENGTHS[:3])
    logits = model(
        inputs_embeds=embedded, position_ids=positions, use_cache=False, sample_lengths=LENGTHS,
        logits_to_keep=torch.arange(start, stop),
    ).logits  # fmt: skip
    logits.square().sum().backward()
    assert embedded.grad is not None
    assert (embedded.grad[0, start:stop].abs().sum(-1) > 0).all()
    assert embedded.grad[0, :start].abs().max() == 0
    assert embedded.grad[0, stop:].abs().max() == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_of_a_sample_do_not_depend_on_what_is_packed_with_it(family: str) -> None:
    model, parts = tiny_model(family), samples()
    prepare_model(model, False)
    with torch.no_grad():
        first = pack(model, [parts[2], parts[0], parts[4]])[: LENGTHS[2]]
        second = pack(model, [parts[3], parts[4], parts[2], parts[0]])[LENGTHS[3] + LENGTHS[4] :][: LENGTHS[2]]
    assert torch.equal(first, second)


def test_a_nan_in_one_sample_reaches_no_other_sample() -> None:
    model, parts = tiny_model("llama"), samples()
    prepare_model(model, False)
    embedded = model.get_input_embeddings()(torch.cat(parts))[None].detach()
    embedded[0, : LENGTHS[0]] = float("nan")
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    logits = model(inputs_embeds=embedded, position_ids=positions, use_cache=False, sample_lengths=LENGTHS).logits[0]
    assert logits[: LENGTHS[0]].isnan().all()
    assert logits[LENGTHS[0] :].isfinite().all()


def test_a_model_that_would_not_pass_the_packing_on_is_refused_instead_of_mixing_samples() -> None:
    model = tiny_model("llama")
    prepare_model(model, False)
    with pytest.raises(RuntimeError, match="would see each other"):
        model(input_ids=torch.cat(samples())[None], use_cache=False)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("groups", [1, 3])
def test_packed_attention_equals_one_masked_softmax_in_float64(
    groups: int, window: int | None, softcap: float | None
) -> None:
    """Against scores over all tokens with a block-diagonal mask: gradients of q, k and v too."""
    generator = torch.Generator().manual_seed(groups)
    T, heads, D = sum(LENGTHS), 2, 8
    q, k, v = (
        torch.randn(n, T, D, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (heads * groups, heads, heads)
    )
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = visible(T, window, torch.device("cpu")) & (owner[:, None] == owner[None])
    scores = q @ k.repeat_interleave(groups, 0).transpose(1, 2) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    want = (torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ v.repeat_interleave(groups, 0)).transpose(0, 1)
    got = packed_attention(q, k, v, LENGTHS, 0.3, window, softcap)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    dy = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(got, (q, k, v), dy), torch.autograd.grad(want, (q, k, v), dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
