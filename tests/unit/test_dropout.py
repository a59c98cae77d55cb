"""Dropout from counters: its rate, its independence, and that nothing but the key decides it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from packlora.ops.dropout import dropout
from packlora.ops.dropout.keys import LANE, dropout_threshold, dropped, keys_from, layer_salt, token_keys

T, K = 512, 1000


def keys(job: int = 1, step: int = 0, sample: int = 0, tokens: int = T) -> torch.Tensor:
    return torch.from_numpy(token_keys(job, step, sample, tokens))


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(np.corrcoef(a.flatten().numpy(), b.flatten().numpy())[0, 1])


@pytest.mark.parametrize("p", [0.01, 0.05, 0.1, 0.5, 0.9, 0.99])
def test_rate_is_right_overall_by_feature_and_by_token(p: float) -> None:
    mask = dropped(keys(7), layer_salt("a"), K, p).double()
    spread = math.sqrt(p * (1 - p))
    assert abs(mask.mean() - p) < 5 * spread / math.sqrt(T * K)
    for dim, count in ((0, T), (1, K)):
        z = (mask.mean(dim) - p) / (spread / math.sqrt(count))
        assert z.abs().max() < 6
        assert abs(z.std() - 1) < 0.15  # neither too even nor too uneven


@pytest.mark.parametrize(
    "other",
    [
        {"job": 2}, {"step": 1}, {"sample": 1}, {"salt": "layers.1"}, {"shift_feature": 1}, {"shift_feature": 2},
        {"shift_token": 1},
    ],
)  # fmt: skip
def test_masks_of_other_jobs_steps_samples_layers_features_and_positions_are_independent(other: dict) -> None:
    mask = dropped(keys(1), layer_salt("layers.0"), K, 0.5).double()
    salt = layer_salt(other.get("salt", "layers.0"))
    key = keys(**{name: value for name, value in other.items() if name in ("job", "step", "sample")})
    again = (
        dropped(key, salt, K, 0.5).double().roll(other.get("shift_feature", 0), 1).roll(other.get("shift_token", 0), 0)
    )
    assert abs(correlation(mask, again)) < 5 / math.sqrt(T * K)


def test_triples_of_neighbouring_features_take_all_patterns_equally_often() -> None:
    bits = dropped(keys(3), layer_salt("x"), K - 1, 0.5).long()
    pattern = (bits[:, 0::3][:, :333] * 4 + bits[:, 1::3][:, :333] * 2 + bits[:, 2::3][:, :333]).flatten()
    counts = torch.bincount(pattern, minlength=8).double()
    chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert chi2 < 30  # 7 degrees of freedom, p < 1e-4


def test_mask_depends_on_the_token_alone_not_on_its_place_or_neighbours() -> None:
    whole = dropped(torch.cat([keys(1, 5, 8, 40), keys(2, 9, 1, 30)]), 77, 65, 0.3)
    assert torch.equal(whole[40:], dropped(keys(2, 9, 1, 30), 77, 65, 0.3))
    assert torch.equal(whole[7:9], dropped(keys(1, 5, 8, 40)[7:9], 77, 65, 0.3))


def test_mask_of_a_feature_does_not_depend_on_the_width() -> None:
    assert torch.equal(dropped(keys(), 5, 64, 0.2)[:, :33], dropped(keys(), 5, 33, 0.2))


@pytest.mark.parametrize("salt", [5, 0xF0F0F0F0])
@pytest.mark.parametrize("start", [0, 2, 62, 900])
def test_a_slice_of_what_is_dropped_has_its_slice_of_the_mask(start: int, salt: int) -> None:
    """Of a layer whose inputs lie in several processes; by the specification and by the kernel."""
    from packlora.ops.dropout import kernel

    slice_keys = keys_from(keys(tokens=19), salt, start)
    want = dropped(keys(tokens=19), salt, K, 0.3)[:, start : start + 77]
    assert torch.equal(dropped(slice_keys, salt, want.shape[1], 0.3), want)
    assert torch.equal(kernel.masked(torch.ones(19, want.shape[1]), slice_keys, salt, 0.3, False) == 0, want)


def test_a_slice_begins_at_an_even_feature() -> None:
    with pytest.raises(ValueError, match="at an even feature, not at 3"):
        keys_from(keys(), 1, 3)


def test_known_answer_so_that_a_resumed_run_of_a_later_version_draws_the_same() -> None:
    mask = dropped(torch.from_numpy(token_keys(123456789, 2, 3, 4)), layer_salt("model.layers.0.mlp.up_proj"), 16, 0.5)
    assert ["".join("x" if bit else "." for bit in row) for row in mask.tolist()] == KNOWN


KNOWN = [".x..xx.xx....xxx", "xx.x.x..xx...xxx", "x..x.x..xxx.xx..", "..x..x..x......."]


def test_survivors_are_scaled_so_that_the_expectation_is_exact_and_gradients_use_the_same_mask() -> None:
    x = torch.ones(T, K, dtype=torch.float64)
    out = dropout(x, keys(), 1, 0.1)
    values = out.unique()
    assert len(values) == 2
    assert values[0] == 0
    assert values[1] == 1 / (1 - dropout_threshold(0.1) / LANE)
    assert torch.equal(out == 0, dropped(keys(), 1, K, 0.1))


def test_thresholds_at_the_edges() -> None:
    assert dropout_threshold(0.0) == 0
    assert dropout_threshold(1e-9) == 1  # a rate that was asked for is never silently none
    assert dropout_threshold(1 - 1e-9) == LANE - 1
    for p in (-0.1, 1.0, 1.5):
        with pytest.raises(ValueError, match="must be in"):
            dropout_threshold(p)


def test_a_dropped_nan_is_gone() -> None:
    mask = dropped(keys(), 1, K, 0.5)
    x = torch.zeros(T, K).masked_fill(mask, float("nan"))
    assert dropout(x, keys(), 1, 0.5).isfinite().all()


@pytest.mark.parametrize("scaled", [False, True])
def test_the_kernel_drops_what_the_specification_drops(scaled: bool) -> None:
    """Interpreted; rows of x need not be next to each other, nor the words of a key."""
    from packlora.ops.dropout import kernel, masked

    keys, x = torch.from_numpy(token_keys(3, 1, 4, 19)), torch.randn(19, 300)[:, :77]
    for own in (keys, keys.t().contiguous().t()):
        got, want = (function(x, own, 0xF0F0F0F0, 0.3, scaled) for function in (kernel.masked, masked))
        assert torch.equal(got == 0, want == 0)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
