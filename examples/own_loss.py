"""A loss of your own, for `train.objective: examples/own_loss.py:loss`: PPO's, which is clipped.

Completions with a positive `advantage` become more likely, others less, compared with the log-probabilities that their labels
had when they were written (`logprobs`, one for each label).
"""

from __future__ import annotations

import torch


def loss(logp, rows):
    ratio, advantage = torch.exp(logp - rows.column("logprobs")), rows.column("advantage")
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * advantage, clipped * advantage), {"ratio": ratio}


loss.weights = "row"  # of a label alone: an output layer with an adapter is run once
