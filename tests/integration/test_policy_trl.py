"""Losses of policies against TRL's GRPOTrainer: its own `_compute_loss`, on log-probabilities that are given, in float64."""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from packlora.data.encode import Sample
from packlora.engine.objective import RowsView
from packlora.engine.objectives.policy import PolicyObjective
from packlora.engine.rows import Row

LENGTHS = (5, 9, 2, 7)
LONGEST = 12
KL = 0.04


@cache
def loss_of_trl() -> Callable[..., torch.Tensor]:
    """The method of the installed GRPOTrainer, compiled by itself: its module imports libraries that the loss does not use."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL is not installed")
    tree = ast.parse((Path(spec.origin).parent / "trainer" / "grpo_trainer.py").read_text())
    (method,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_compute_loss"]
    known: dict[str, Any] = {"torch": torch, "nanmin": torch.min, "nanmax": torch.max}
    exec(compile(ast.Module([method], []), "grpo_trainer.py", "exec"), known)
    found: Callable[..., torch.Tensor] = known["_compute_loss"]
    return found


def of_trl(
    loss_type: str, level: str, kl: float, logp_NT: torch.Tensor, given: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss, and the metrics that go with it."""
    high = 1.3 if loss_type == "cispo" else 0.28
    own: Any = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logp_NT, torch.zeros_like(logp_NT), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level=level,
        beta=kl, loss_type=loss_type, epsilon_low=0.2, epsilon_high=high, use_vllm=True,
        vllm_importance_sampling_correction=True, model=torch.nn.Linear(1, 1), current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST, _entropy_bonus_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda value: value, reduce=lambda value, **how: value),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
    )  # fmt: skip
    ids = torch.zeros(logp_NT.shape, dtype=torch.long)
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids} | given
    loss = loss_of_trl()(own, None, inputs)
    return loss, {name: values[0] for name, values in own._metrics["train"].items()}


@pytest.mark.parametrize("kl", [0.0, KL])
@pytest.mark.parametrize(
    ("loss_type", "level", "objective"),
    [
        ("grpo", "token", {"name": "ppo", "over": "samples"}),
        ("dapo", "token", {"name": "ppo"}),
        ("bnpo", "token", {"name": "ppo"}),
        ("dr_grpo", "token", {"name": "ppo", "over": "constant", "length": LONGEST}),
        ("cispo", "token", {"name": "cispo", "clip": (0.0, 1.3)}),
        ("grpo", "sequence", {"name": "gspo", "over": "samples"}),
    ],
)
def test_losses_and_gradients_are_those_of_trl(
    loss_type: str, level: str, objective: dict[str, Any], kl: float
) -> None:
    draw = np.random.default_rng(1)
    wide, count = max(LENGTHS), len(LENGTHS)
    logp, sampled, reference = (-1 - 2 * draw.random((count, wide)) for _ in range(3))
    sampled = logp + 0.5 * draw.standard_normal((count, wide)) + draw.standard_normal((count, 1))
    gains, correction = draw.standard_normal(count), draw.uniform(0.5, 1.0, (count, wide))
    if level == "sequence":
        correction[:] = correction[:, :1]  # one of a sequence, as TRL takes it at this level
    mask = np.arange(wide) < np.array(LENGTHS)[:, None]

    leaf = torch.from_numpy(logp).requires_grad_()
    wanted, metrics = of_trl(
        loss_type, level, kl, leaf,
        {
            "completion_mask": torch.from_numpy(mask).double(), "advantages": torch.from_numpy(gains),
            "old_per_token_logps": torch.from_numpy(sampled), "ref_per_token_logps": torch.from_numpy(reference),
            "importance_sampling_ratio": torch.from_numpy(correction), "num_items_in_batch": torch.tensor(sum(LENGTHS)),
        },
    )  # fmt: skip
    (gradient_NT,) = torch.autograd.grad(wanted, leaf)

    rows = [
        Row(Sample(
            np.zeros(length + 1, np.int32), np.arange(length + 1) > 0,
            columns={
                "logprobs": sampled[n, :length], "advantages": np.array(gains[n]), "reference": reference[n, :length],
                "correction": correction[n, :length],
            },
        ))
        for n, length in enumerate(LENGTHS)
    ]  # fmt: skip
    own = PolicyObjective(**{"clip": (0.8, 1.28), "kl": kl} | objective)
    facts = {"units": float(sum(LENGTHS)), "samples": float(count)}
    logp_L = torch.from_numpy(logp[mask]).requires_grad_()
    losses_L, sums = own.loss(logp_L, RowsView.of(own, rows, facts))
    loss = losses_L.sum() / facts["units"]
    (gradient_L,) = torch.autograd.grad(loss, logp_L)

    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=0)
    torch.testing.assert_close(gradient_L, gradient_NT[torch.from_numpy(mask)], rtol=1e-10, atol=1e-15)
    told = own.report(sums.tolist(), facts)
    assert 0 < told["clip_ratio/region_mean"] < 1
    for name in {"clip_ratio/region_mean", "kl"} & metrics.keys() if level == "token" else ():
        assert told[name] == pytest.approx(metrics[name], rel=1e-6), name
