"""Adapters on Megatron-Core models, where no processes are needed: states of several chunks, memory that runs out, weights that
count no versions, and words of other processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core")

from packlora.adapters.owners import TokenOwners
from packlora.errors import InputError
from packlora.megatron import forward
from packlora.megatron.adapters import MegatronAdapters
from packlora.megatron.checkpoint import load_state
from packlora.megatron.layers import Found


def placed(chunks: int) -> Any:
    """Adapter "x" on a layer in each of the chunks, all at the same path."""
    made, layers, weights = [], {}, {}
    for number in range(chunks):
        chunk, layer = nn.Module(), nn.Linear(4, 4, bias=False)
        chunk.fc, layer.lora_A_x = layer, nn.Parameter(torch.zeros(2, 4))
        own: Any = SimpleNamespace(
            A=layer.lora_A_x, B=torch.ones(4, 2), magnitude=None, spec=SimpleNamespace(scaling=1.0)
        )
        own.named_parameters = lambda layer=layer: {"A": layer.lora_A_x}
        layers[str(number)], weights[str(number)] = Found("fc", str(number), layer, "linear"), own
        made.append(chunk)
    return SimpleNamespace(
        chunks=made, layers=layers, weights={"x": weights}, owned=SimpleNamespace(merged=None, names=("x",))
    )


def test_a_state_without_one_of_the_chunks_is_refused_where_their_layers_have_one_path() -> None:
    whole = {f"model{number}.fc.lora_A_x": torch.full((2, 4), 1.0 + number) for number in range(2)}
    model = placed(2)
    with pytest.raises(InputError, match=r"adapter 'x' lacks model1\.fc\.lora_A_x"):
        load_state(model, {"model0.fc.lora_A_x": torch.ones(2, 4)})
    with pytest.raises(InputError, match=r"model2\.fc\.lora_A_x"):
        load_state(model, whole | {"model2.fc.lora_A_x": torch.ones(2, 4)})
    load_state(model, whole)
    assert [float(chunk.fc.lora_A_x.detach().mean()) for chunk in model.chunks] == [1.0, 2.0]


def test_where_there_is_no_memory_for_all_frozen_weights_nothing_is_merged() -> None:
    model, cpu, taken = placed(2), torch.Tensor.cpu, list[torch.Tensor]()
    with torch.no_grad():
        for chunk in model.chunks:
            chunk.fc.lora_A_x.fill_(1.0)
    before = [layer.tensor().detach().clone() for layer in model.layers.values()]

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if taken:
            raise MemoryError
        taken.append(tensor)
        return cpu(tensor)

    adapters = MegatronAdapters(model)
    with mock.patch.object(torch.Tensor, "cpu", once), pytest.raises(MemoryError):
        adapters.merge("x")
    assert model.owned.merged is None
    for layer, own in zip(model.layers.values(), before, strict=True):
        assert torch.equal(layer.tensor(), own)
    adapters.merge("x")
    assert not torch.equal(model.layers["0"].tensor(), before[0])
    adapters.unmerge()
    for layer, own in zip(model.layers.values(), before, strict=True):
        assert torch.equal(layer.tensor(), own)


def test_a_routers_weight_that_counts_no_versions_is_cast_at_every_call() -> None:
    with torch.inference_mode():
        weight = torch.zeros(2, 2, dtype=torch.bfloat16)
    layer: Any = SimpleNamespace(module=SimpleNamespace(gating=None), tensor=lambda: weight)
    router = forward.RouterForward(layer, mock.Mock(), mock.Mock())
    assert not router._weight(torch.float32).any()
    with torch.inference_mode():
        weight += 1
    assert router._weight(torch.float32).all()


def test_a_word_that_is_elsewhere_gets_nothing_of_the_first_row_here() -> None:
    weight = torch.ones(4, 3)
    weight[0] = torch.nan
    module: Any = SimpleNamespace(
        forward=None, vocab_start_index=4, vocab_end_index=8, weight=weight, reduce_scatter_embeddings=False
    )
    own = SimpleNamespace(A=torch.ones(2, 4), B=torch.ones(3, 2), spec=SimpleNamespace(scaling=0.5))
    owned: Any = SimpleNamespace(merged=None, owners=lambda count: TokenOwners(count, ((0, 0, count),)))
    embedding = forward.EmbeddingForward(SimpleNamespace(module=module, group=None), {0: own}, owned)  # type: ignore[arg-type]
    with mock.patch.object(forward.mappings, "reduce_from_tensor_model_parallel_region", lambda y, group: y):
        found = embedding(torch.tensor([[1, 5]]))
    assert found.tolist() == [[[0.0] * 3, [2.0] * 3]]
