"""NEFTune's noise: evenly distributed, of the size of the paper, the sample's own whatever is beside it, and none elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from conftest import TINY, tiny_model
from packed import PackedSample, parts
from peft import LoraConfig
from test_loss import samples

from packlora.adapters.attach import attach
from packlora.adapters.embeddings import change_embeddings
from packlora.adapters.spec import resolve
from packlora.base.packing import prepare_model
from packlora.engine.collate import collate
from packlora.engine.heads import token_losses
from packlora.engine.objectives.neftune import add_noise
from packlora.ops.dropout.keys import packed_token_keys, uniform

CPU = torch.device("cpu")


def noise_of(packed: list[PackedSample], width: int) -> torch.Tensor:
    """What is added to embeddings that are zero."""
    batch = collate(parts(packed), CPU)
    assert batch.owners.columns
    return add_noise(torch.zeros(1, batch.owners.total, width, dtype=torch.float64), batch.owners.columns)[0]


def test_the_numbers_are_evenly_distributed_and_independent() -> None:
    keys = torch.from_numpy(packed_token_keys([7, 7], [0, 1], [3, 3], [300, 300]))
    drawn = uniform(keys, 99, 257)
    assert drawn.abs().max() < 1 and drawn.shape == (600, 257)
    counts = torch.histc(drawn, 64, -1, 1)
    expected = drawn.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 110, "chi squared of 63 degrees, one in 5,000"
    for a, b in ((drawn[:300], drawn[300:]), (drawn[:-1], drawn[1:]), (drawn[:, :-1], drawn[:, 1:])):
        assert abs(float((a * b).mean())) * 3 < 5 / a.numel() ** 0.5, "steps, positions and features"
    assert torch.equal(uniform(keys[5:6], 99, 31), drawn[5:6, :31])


def test_the_noise_is_the_papers_and_that_of_the_sample_alone_to_the_bit() -> None:
    plain = samples((40, 17, 30, 55))
    picked = [replace(plain[0], noise=(11, 5.0)), plain[1], replace(plain[2], noise=(12, 0.5)), plain[3]]
    together, start = noise_of(picked, 48), 0
    for item in picked:
        n = item.sample.num_tokens
        own = together[start : start + n]
        start += n
        if item.noise is None:
            assert not own.any()
            continue
        most = item.noise[1] / (n * 48) ** 0.5
        assert 0.99 * most < own.abs().max() < most
        assert torch.equal(own, noise_of([item], 48)[:n]), "the filler of a short row has none"
        for other in (replace(item, step=1), replace(item, number=9), replace(item, noise=(13, item.noise[1]))):
            assert not torch.isclose(own, noise_of([other], 48)[:n]).any(dim=1).all()
    assert not collate(parts(plain), CPU).owners.columns


def test_a_model_is_given_noisy_embeddings_in_training_and_others_keep_their_bits() -> None:
    model = tiny_model("llama", torch.float32)
    prepare_model(model, False)
    spec = resolve(LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"), model, "job")
    attached, _ = attach(model, {"job": spec}, 0)
    change_embeddings(model, attached, add_noise)
    first, second = samples((40, 30))
    losses = {}
    for name, packed in {"plain": [first, second], "noisy": [first, replace(second, noise=(3, 50.0))]}.items():
        batch = collate(parts(packed), CPU)
        with attached.active(batch.owners), torch.no_grad():
            losses[name], *_ = token_losses(model, batch, fused=True)
    rows = first.sample.num_labels
    assert torch.equal(losses["plain"][:rows], losses["noisy"][:rows])
    assert not torch.isclose(losses["plain"][rows:], losses["noisy"][rows:], rtol=1e-4).all()
    batch = collate(parts([replace(second, noise=(3, 50.0))]), CPU)
    with attached.active(batch.owners), torch.no_grad():
        got, *_ = token_losses(model, batch, fused=True)
    table, noise = (
        model.get_input_embeddings().weight,
        noise_of([replace(second, noise=(3, 50.0))], TINY["hidden_size"]),
    )
    embeds = table[torch.from_numpy(second.sample.ids).long()][None] + noise.float()
    model.set_attn_implementation("eager")
    with attached.only(0), torch.no_grad():
        logits = model(inputs_embeds=embeds, use_cache=False).logits[0]
    at = np.flatnonzero(second.sample.is_label)
    labels = torch.from_numpy(second.sample.ids[at]).long()
    want = torch.nn.functional.cross_entropy(logits[torch.from_numpy(at) - 1], labels, reduction="none")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
