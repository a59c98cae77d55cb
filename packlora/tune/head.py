"""Measures what the output layer and the loss cost beside a decoder layer, on random weights of the model's shape."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from packlora.base.demo_model import base_path
from packlora.base.liger import use_liger
from packlora.base.packing import hidden_states, prepare_model
from packlora.base.shape import decoder_layers, plain_head
from packlora.config import Run
from packlora.data.encode import Sample
from packlora.engine.collate import collate
from packlora.engine.heads import token_losses
from packlora.engine.memory import synchronize
from packlora.engine.parts import Part
from packlora.engine.rows import Row
from packlora.parallel.sharded import empty_model
from packlora.pipeline.checks import layer_chain
from packlora.pipeline.stages import Elsewhere, NoEmbedding, Stage
from packlora.runtime.head_cost import HeadCost
from packlora.runtime.prepared_job import ModelShape

MOST_TOKENS = {"cuda": 8192, "cpu": 1024}
LENGTH = 512
"""Tokens of each sample of the microbatch that is timed."""
WARMUP, COUNTED = 2, 5
"""Runs."""


def measure_head(run: Run, shape: ModelShape, device: torch.device) -> HeadCost:
    """Time the model's last two layers, the last one, and that one with the output layer and the loss.

    Raises:
        InputError: the model cannot be cut into stages.
        torch.OutOfMemoryError: the device does not hold two layers and the output layer.
    """
    budget = run.max_tokens_per_microbatch
    most = MOST_TOKENS.get(device.type, MOST_TOKENS["cpu"])
    tokens = most if budget == "auto" else min(most, int(budget))
    lengths = [LENGTH] * (tokens // LENGTH) or [tokens]
    tokens, generator = sum(lengths), np.random.default_rng(0)
    labels = [np.arange(length) > 0 for length in lengths]
    rows = [
        Row(Sample(generator.integers(0, shape.vocabulary, len(own)).astype(np.int32), own), (0, 0, number))
        for number, own in enumerate(labels)
    ]
    batch = collate([Part(0, rows)], device, tokens)
    model, shorten = _last_layers(run, tokens, device)
    fused = plain_head(model) is not None

    def layers() -> None:
        hidden = hidden_states(model, batch.input_ids_T, batch.position_ids_T, batch.sample_lengths)
        hidden.backward(torch.ones_like(hidden))

    def with_head() -> None:
        token_losses(model, batch, batch.weights_L, fused).total.backward()

    two = _seconds(layers, device)
    shorten()
    one, head = _seconds(layers, device), _seconds(with_head, device)
    costs = [active for _, active in shape.layer_numbers]
    mean = statistics.mean(costs) / statistics.mean(costs[-2:]) if costs and costs[-1] else 1.0
    least = 0.01 * two  # the clock's resolution, for a layer or a head that costs nearly nothing
    return HeadCost(tokens, mean * max(two - one, least), max(head - one, least))


def _last_layers(run: Run, tokens: int, device: torch.device) -> tuple[PreTrainedModel, Callable[[], None]]:
    """A model that has its last two layers and its output layer alone, with random weights; and what leaves it only the last
    one of the two."""
    model = empty_model(base_path(run.base_model), run.revision, getattr(torch, run.dtype), run.trust_remote_code)
    width, dtype, tuples = layer_chain(model)
    layers = decoder_layers(model)
    nobody: Any = None
    here = Stage(nobody, range(max(0, len(layers) - 2), len(layers)), width, dtype)

    def away(number: int) -> None:
        path = list(layers)[number]
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, Elsewhere(here, number, layers[path], tuples[number]))

    for number in range(len(layers) - 2):
        away(number)
    model.set_input_embeddings(_Given(model.get_input_embeddings().weight, tokens, device))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                made = torch.randn(parameter.shape, dtype=parameter.dtype, device=device).mul_(0.02)
                module._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
    model.to(device)
    prepare_model(model, run.gradient_checkpointing)
    use_liger(model, run.liger)
    return model, lambda: away(max(0, len(layers) - 2))


class _Given(NoEmbedding):
    """A stand-in for the embedding: the same random hidden states each time, with a gradient."""

    def __init__(self, weight: torch.Tensor, tokens: int, device: torch.device) -> None:
        super().__init__(weight)
        hidden = torch.randn(1, tokens, weight.shape[1], dtype=weight.dtype, device=device)
        self._hidden = [hidden.requires_grad_()]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._hidden[0]


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    took = []
    for number in range(WARMUP + COUNTED):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        if number >= WARMUP:
            took.append(time.perf_counter() - start)
    return statistics.median(took)
