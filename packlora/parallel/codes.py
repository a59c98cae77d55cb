"""A quantised base model that is sharded by rows.

Each process makes the codes of a whole layer out of the floats in the files, one layer at a time, as a process does that has
all of it, and keeps its own rows. FSDP2 gathers codes as it gathers floats. Scales take some hundredths of what codes take, and
are whole everywhere: their blocks go over the borders of rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.base.quantized import codes_made_of, quantised_paths
from packlora.config import QuantizationConfig
from packlora.ops.lora_linear.gathered_codes import GatheredCodesLinear


def share_codes(model: PreTrainedModel, quantization: QuantizationConfig, dtype: torch.dtype) -> None:
    """Put layers of codes in the place of those that are quantised, in a model on the meta device.

    Args:
        quantization: by bitsandbytes, of floats.
        dtype: of the run.
    """
    make = partial(codes_made_of, quantization=quantization, dtype=dtype)
    for path in quantised_paths(model):
        whole: Any = model.get_submodule(path)
        N, K = whole.weight.shape
        stored = ((N, K), torch.int8) if quantization.method == "int8" else (((N * K + 1) // 2, 1), torch.uint8)
        model.set_submodule(path, GatheredCodesLinear(whole, make, stored, dtype))
