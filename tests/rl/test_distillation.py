"""Advantages of on-policy distillation against the formula of docs/rewards.md, and autograd's gradient of the divergence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packlora.config import JobConfig
from packlora.rl.data import FOLDER, Batch, Completion, RolloutSamples
from packlora.rl.prompts import Prompt

Q = [[-0.5, -1.25, -2.0], [-0.75], [-3.0, -0.25], [-1.5, -1.0, -0.125, -4.0]]
"""Log-probabilities of each completion's tokens by the adapter that drew them, and by the teacher."""
T = [[-1.5, -0.25, -2.5], [-0.5], [-1.0, -2.25], [-0.5, -1.75, -3.0, -0.25]]
A = [0.5, -0.5, 0.0, 1.25]
"""Advantages of the rewards."""


def advantages(q: Any, t: Any, rewards: Any, weight: float, folder: Path) -> list[np.ndarray]:
    """Advantages of the tokens of a batch, as the loss is given them."""
    job = JobConfig.model_validate({
        "name": "pupil", "data": {"path": "none"},
        "rollout": {"teacher": "base", "teacher_weight": weight, "num_generations": len(q)},
        "train": {"loss_type": "importance_sampling", "global_batch_size": len(q)},
    })  # fmt: skip
    samples = RolloutSamples(job, [Prompt("none, line 1", np.array([3], np.int32), "the")], folder / FOLDER, 1, 1)
    ones = [
        Completion(0, [5] * len(own), own, reward, 0.0, 0.0, {}, teacher=taught)
        for own, taught, reward in zip(q, t, rewards, strict=True)
    ]
    samples.put(Batch(0, 0, "", tuple(ones)))
    return [sample.columns["advantages"] for sample in samples.samples(0)]


@pytest.mark.parametrize("weight", [1.0, 0.5, 3.0])
def test_an_advantage_is_of_the_reward_and_weight_times_log_t_less_log_q_less_its_mean_over_all_tokens(
    weight: float, tmp_path: Path
) -> None:
    differences = [
        math.fsum([t, -q]) for own, taught in zip(Q, T, strict=True) for q, t in zip(own, taught, strict=True)
    ]
    mean = math.fsum(differences) / 10
    assert abs(mean) > 0.05, "a mean of nothing would hide that it is not subtracted"
    found = advantages(Q, T, A, weight, tmp_path)
    assert [own.shape for own in found] == [(3,), (1,), (2,), (4,)]
    wanted = [
        a + weight * (t - q - mean)
        for a, own, taught in zip(A, Q, T, strict=True)
        for q, t in zip(own, taught, strict=True)
    ]
    np.testing.assert_allclose(np.concatenate(found), wanted, rtol=0, atol=1e-12)
    plain = np.concatenate(found) - np.repeat(A, [3, 1, 2, 4])
    assert abs(plain.sum()) < 1e-12


def test_the_expected_gradient_is_that_of_the_divergence_from_the_teacher(tmp_path: Path) -> None:
    """One token of eight, each drawn as often as it is likely: sums over advantage times gradient of log q are autograd's
    gradient of -KL(adapter || teacher)."""
    q = np.array([8, 4, 4, 2, 2, 2, 1, 1]) / 24
    logits = torch.tensor(np.log(q), requires_grad=True)
    log_t = torch.tensor([0.3, -1.0, 0.7, 0.1, -0.4, 1.2, 0.0, -2.0], dtype=torch.float64).log_softmax(0)
    log_q = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad(-(log_q.exp() * (log_q - log_t)).sum(), logits, retain_graph=True)
    drawn = np.repeat(np.arange(8), (q * 24).round().astype(int))
    own = [[float(log_q.detach()[token])] for token in drawn]
    found = advantages(own, [[float(log_t[token])] for token in drawn], [0.0] * 24, 1.0, tmp_path)
    surrogate = sum(float(one[0]) * log_q[token] for one, token in zip(found, drawn, strict=True)) / 24
    (got,) = torch.autograd.grad(surrogate, logits)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
