"""Inputs of checkpointed layers on the host: no bit changes, few are on the device at a time, buffers are used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import rows_into, tiny_model
from test_training import adapter, config, train

import packlora
from packlora.base import activation_offloading
from packlora.base.activation_offloading import AHEAD, Kept, Offloading, offload_inputs
from packlora.base.packing import hidden_states, prepare_model
from packlora.errors import InputError

LAYERS = 5
CPU = torch.device("cpu")


class Watched(Offloading):
    """Counts the inputs that are on the device."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.all: list[Kept] = []
        self.most = 0

    def _count(self) -> None:
        self.most = max(self.most, sum(own.on_device is not None for own in self.all))

    def keep(self, x: torch.Tensor, layer: int) -> Kept:
        own = super().keep(x, layer)
        self.all.append(own)
        self._count()
        return own

    def take(self, own: Kept) -> torch.Tensor:
        x = super().take(own)
        self._count()
        return x


def gradient(model: Any, length: int, backward: bool = True, stride: int | None = None) -> torch.Tensor:
    """Of the embeddings' output, through the decoder. stride: of that output's first dimension, whose size is 1."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, 300, (length,), generator=generator)
    made: list[torch.Tensor] = []

    def leaf(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        strides = output.stride() if stride is None else (stride, *output.stride()[1:])
        made.append(output.detach().as_strided(output.shape, strides).requires_grad_())
        return made[-1]

    hook = model.get_input_embeddings().register_forward_hook(leaf)
    hidden_TD = hidden_states(model, ids, torch.arange(length), (length,))
    hook.remove()
    if not backward:
        return hidden_TD.detach()
    return torch.autograd.grad((hidden_TD * hidden_TD.detach().cos()).sum(), made[0])[0]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gradients_are_those_of_checkpoints_to_the_bit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several lengths one after the other, also after a forward whose backward never was."""
    made: list[Watched] = []
    monkeypatch.setattr(activation_offloading, "Offloading", lambda *args: made.append(Watched(*args)) or made[0])
    model = tiny_model(family, num_hidden_layers=LAYERS)
    prepare_model(model, True)
    want = [gradient(model, length) for length in (40, 64, 24)]
    offload_inputs(model, CPU, family, True)
    got = [gradient(model, 40)]
    gradient(model, 48, backward=False)
    got += [gradient(model, length) for length in (64, 24)]
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    (watched,) = made
    assert len(watched.all) == 4 * LAYERS and watched.most == AHEAD + 1 < LAYERS
    del watched.all
    assert len(watched._free) <= 2 * (LAYERS - 1)


def test_an_input_comes_back_with_its_strides() -> None:
    """By which torch chooses a product and what it saves, so that a layer that is computed again saves the same."""
    model = tiny_model("llama", num_hidden_layers=2)
    prepare_model(model, True)
    want = gradient(model, 40, stride=1)
    offload_inputs(model, CPU, "llama", True)
    assert torch.equal(gradient(model, 40, stride=1), want)
    offloading = Offloading(CPU, 3)
    for x in (
        torch.randn(3, 4).t(),
        torch.randn(1, 6, 2).as_strided((1, 6, 2), (1, 2, 1)),
        torch.randn(2, 1).expand(2, 3),
    ):
        kept = offloading.keep(x, 0)
        offloading.keep(x, 1)
        offloading.keep(x, 2)
        back = offloading.take(kept)
        assert torch.equal(back, x) and back.data_ptr() != x.data_ptr()
        assert back.stride() == torch.empty_like(x).stride()


def test_a_buffer_is_filled_again_when_its_input_was_asked_for() -> None:
    offloading = Offloading(CPU, 3)
    for size in (12, 12, 6):
        inputs = [torch.randn(size, 4) for _ in range(3)]
        kept = [offloading.keep(x, layer) for layer, x in enumerate(inputs)]
        for own, x in zip(reversed(kept), reversed(inputs), strict=True):
            assert torch.equal(offloading.take(own), x)
        assert len(offloading._free) == 2  # the last layer's input has none


def test_a_run_has_the_bits_that_it_has_without(tiny_base: Any, tmp_path: Path) -> None:
    rows = rows_into(tmp_path)
    tree = config(tiny_base(), tmp_path / "plain", rows, gradient_checkpointing=True)
    train(tree)
    train({**tree, "output_dir": str(tmp_path / "host"), "activation_offloading": True})
    for job in tree["jobs"]:
        ours, theirs = (adapter(tmp_path / out, job["name"]) for out in ("host", "plain"))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({}, "set gradient_checkpointing: true"),
        ({"gradient_checkpointing": True, "parallel": {"shard_base": True}}, "does not go with parallel.shard_base"),
    ],
    ids=["without checkpoints", "in parts"],
)
def test_where_it_cannot_be_it_is_refused(keys: dict[str, Any], what: str, tiny_base: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"activation_offloading: true .*{what}"):
        packlora.train(config(tiny_base(), tmp_path / "out", rows_into(tmp_path), activation_offloading=True, **keys))
    assert not (tmp_path / "out").exists()


def test_a_model_without_checkpointed_layers_is_refused() -> None:
    with pytest.raises(InputError, match="transformers checkpoints no layer of it"):
        offload_inputs(torch.nn.Linear(2, 2), CPU, "mine", True)  # type: ignore[arg-type]
