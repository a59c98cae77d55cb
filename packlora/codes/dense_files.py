"""The weights of a model that is saved in codes as dense tensors, one by one: what is merged in the place of weight files."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.base.classes import served_class
from packlora.base.held import SINGLE
from packlora.base.weight_files import WeightFiles
from packlora.codes.load import check_quantization, read_quantised
from packlora.codes.stored import Stored
from packlora.codes.weight import QuantizedLinear

SHARD_BYTES = 4 * 2**30
"""Bytes of a file that the dequantised model is written to, in float32."""


class DequantisedFiles:
    """Weights of a quantised model with the interface of WeightFiles. The model, of the class that its folder names, is held in
    codes, and each read dequantises one weight.

    Raises:
        InputError: the model cannot be loaded.
    """

    def __init__(
        self, path: str, revision: str | None, stored: Stored, dtype: torch.dtype, device: torch.device
    ) -> None:
        """dtype: dtype in which a run computed with the dequantised weights."""
        check_quantization(stored.as_asked, device, f"base_model {path!r}")
        self.path, self.dtype, self._files = path, dtype, WeightFiles(path, revision)
        model = read_quantised(path, revision, stored.as_asked, stored, dtype, device, class_of=served_class)
        self._layers: dict[str, QuantizedLinear] = {
            f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)
        }
        self._rest: dict[str, torch.Tensor] = {
            name: tensor for name, tensor in _of_one_name(model).items() if name not in self._layers
        }
        self.names = self._shared_out()

    @property
    def keys(self) -> dict[str, str]:
        """Names of the model's weights, mapped to themselves, in the format of weight_files.keys_of."""
        return {name: name for names in self.names.values() for name in names}

    @property
    def in_codes(self) -> set[str]:
        return set(self._layers)

    def read(self, key: str) -> torch.Tensor:
        """A weight on the CPU: of a layer in codes in float32, else as the files have it."""
        if key in self._layers:
            return self._layers[key].frozen.codes.values(self.dtype).float().cpu()
        own = self._rest[key]
        return self._files.read(key) if self._files.shapes.get(key) == tuple(own.shape) else own.detach().cpu()

    def _shared_out(self) -> dict[str, list[str]]:
        """The keys of each file that is to be written, by its name."""
        shards: list[list[str]] = [[]]
        size = 0
        for name in (*self._rest, *self._layers):
            own: Any = self._layers[name].frozen.shape if name in self._layers else self._rest[name].shape
            more = 4 * torch.Size(own).numel()
            if shards[-1] and size + more > SHARD_BYTES:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += more
        if len(shards) == 1:
            return {SINGLE: shards[0]}
        return {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards)}


def _of_one_name(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a model that are saved; tied ones have the first of their names."""
    saved, parameters = model.state_dict().keys(), dict(model.named_parameters())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return parameters | buffers
