"""The loss of a job that learns from rewards, and what its logs say, by TRL's names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packlora.config import TrainConfig
from packlora.data.encode import Sample
from packlora.engine.objective import Facts
from packlora.engine.objectives.grpo.loss import settings
from packlora.engine.objectives.policy import PolicyObjective
from packlora.rl.config import RolloutConfig
from packlora.rl.correction import told_of
from packlora.rl.refilled import figures_of
from packlora.rl.rewards import names_of
from packlora.rl.temperature import Temperature


class RewardObjective(PolicyObjective):
    """A loss of policies whose samples have a reward. rewards: names of its parts. group: completions of a prompt."""

    rewards: Sequence[str] = ()
    group: int = 1
    why_zero = (
        "all completions of each prompt had the same reward, or their rewards failed, so they taught nothing; rollouts/ in "
        "the job's folder has them with their rewards"
    )

    @staticmethod
    def of(train: TrainConfig, rollout: RolloutConfig) -> RewardObjective:
        """Objective of a job."""
        own = RewardObjective(**settings(train), length=rollout.max_new_tokens)
        if rollout.temperature != 1:
            own.terms = (Temperature(rollout.temperature),)
        if not rollout.reward_sources:
            own.why_zero = "the teacher has the adapter's own probabilities"
        own.rewards, own.group = names_of(rollout.reward_sources), rollout.num_generations
        return own

    def facts(self, batch: Sequence[Sample]) -> Facts:
        """Means over the completions of a global batch."""
        by_name = {name: np.array([float(sample.columns[name]) for sample in batch]) for name in COLUMNS}
        rewards, lost = by_name["reward"], by_name["lost"]
        judged = rewards[lost == 0]
        lengths = np.array([sample.num_labels for sample in batch])
        idle = np.array([not sample.columns["advantages"].any() for sample in batch]).reshape(-1, self.group).all(1)
        away = [sample.columns["away"] for sample in batch if "away" in sample.columns]
        found = {
            "reward": float(judged.mean()) if len(judged) else np.nan,
            "reward_std": float(judged.std(ddof=1)) if len(judged) > 1 else np.nan,
            "reward_stderr": standard_error(rewards, lost, self.group),
            "frac_reward_zero_std": float(np.mean(idle)), "completions/mean_length": float(lengths.mean()),
            "completions/clipped_ratio": float(by_name["cut"].mean()), "rollout/lost": float(lost.mean()),
            "sampling/sampling_logp_difference/mean": float(by_name["drift"].mean()),
        }  # fmt: skip
        if not np.isnan(by_name["seconds"]).any():  # those of an evaluation are not counted
            found["rollout/staleness"] = float(by_name["staleness"].mean())
            found["rollout/seconds"] = float(by_name["seconds"].max())
        found |= figures_of(batch[0])
        if away:
            found["teacher/reverse_kl"] = float(np.mean(away))
        if "entropy" in batch[0].columns:
            found["entropy"] = float(np.average([sample.columns["entropy"] for sample in batch], weights=lengths))
        if "turns" in batch[0].columns:
            found |= _of_turns(batch)
        found |= told_of(batch)
        for name in (name for name in self.rewards if f"rewards/{name}" in batch[0].columns):
            own = np.array([float(sample.columns[f"rewards/{name}"]) for sample in batch])
            found[f"rewards/{name}/mean"] = float(own[~np.isnan(own)].mean()) if (~np.isnan(own)).any() else np.nan
        return found

    def report(self, sums: Sequence[float], facts: Facts) -> dict[str, float]:
        """Means over the labels of the global batch, and those of `facts`."""
        told = {name: value for name, value in facts.items() if name not in ("units", "samples")}
        return told | super().report(sums, facts)


def standard_error(rewards: np.ndarray, lost: np.ndarray, group: int) -> float:
    """Standard error of the mean reward over prompts, as completions of one prompt are alike; NaN for fewer than two.

    Args:
        rewards, lost: of all completions [N], those of a prompt together. group: completions of a prompt.
    """
    kept = (lost == 0).reshape(-1, group)
    some = kept.any(1)
    means = (rewards.reshape(-1, group) * kept)[some].sum(1) / kept[some].sum(1)
    return float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else np.nan


COLUMNS = ("reward", "drift", "cut", "lost", "staleness", "seconds")


def _of_turns(batch: Sequence[Sample]) -> dict[str, float]:
    """Means of completions with environments: turns, calls of tools by completion, and the share of calls that fail."""
    turns, calls, failures = (
        sum(float(sample.columns[name]) for sample in batch) for name in ("turns", "calls", "failures")
    )
    return {
        "rollout/turns": turns / len(batch), "tools/call_frequency": calls / len(batch),
        "tools/failure_frequency": failures / calls if calls else 0.0,
    }  # fmt: skip
