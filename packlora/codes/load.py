"""Base models whose linear layers are quantised: as they are loaded, which the run file asks for, or as they were saved.

bitsandbytes and torchao make codes while transformers loads a model, one tensor after the other: neither the host nor the
device ever holds the whole model in the wider type. How models are saved in codes is in stored.py. What transformers leaves
are layers of the libraries, in whose place `own_layers` puts this package's. Embeddings and the output layer stay as they are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel, TorchAoConfig
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import is_bitsandbytes_available, is_torchao_available

from packlora.base.classes import ClassOf, auto_class, served_class
from packlora.base.load import read_model
from packlora.codes.library import EightBit, FourBit, library_codes, state_of
from packlora.codes.stored import Stored, stored_as
from packlora.codes.weight import Codes, QuantizedLinear
from packlora.config import QuantizationConfig
from packlora.errors import InputError
from packlora.ops.twin import twin_of

FLAGS = ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method", "hf_quantizer")
"""Attributes that transformers sets on a quantised model; because of them it refuses operations that are correct for other
layers."""
LIBRARIES = {
    "torchao": (("torchao",), "pip install 'packlora[quant]'"),
    "compressed-tensors": (("compressed_tensors",), "pip install 'packlora[quant]'"),
    "gptq": (("gptqmodel", "optimum"), "pip install gptqmodel optimum"),
    "awq": (("gptqmodel",), "pip install gptqmodel optimum"),
    "fp8": ((), ""),
}  # fmt: skip
"""Python modules that read each method, and the command that installs them; the methods not listed are bitsandbytes'."""
DEFAULT_GROUP = 128
PACKS_INT4 = ("cuda",)
"""Devices for which torchao packs 4 bits. K is filled up to a multiple of INT4_COLUMNS and N to one of INT4_ROWS."""
INT4_ROWS, INT4_COLUMNS = 8, 1024


# --- what can be done here ---------------------------------------------------------------------------------------------


def check_quantization(asked: QuantizationConfig, device: torch.device, what: str = "quantization") -> None:
    """Raise InputError where codes cannot be made or read here. what: asks for them, for the message."""
    said = f"{what}: {asked.described} cannot be met: "
    if asked.method not in LIBRARIES:
        _check_bitsandbytes(device, said)
        return
    modules, remedy = LIBRARIES[asked.method]
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"{said}{name} is not installed; {remedy}")
    if asked.method == "torchao" and not is_torchao_available():
        raise InputError(f"{said}torchao is too old for transformers; pip install -U 'packlora[quant]'")
    if asked.quant_type == "int4_weight_only" and device.type not in PACKS_INT4:
        raise InputError(
            f"{said}torchao packs 4 bits for CUDA devices only, not for {device.type}; int8_weight_only, float8_weight_only "
            "and bitsandbytes' nf4 are made here"
        )


def _check_bitsandbytes(device: torch.device, said: str) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(f"{said}bitsandbytes is not installed; pip install 'packlora[quant]'")
    if not is_bitsandbytes_available():
        raise InputError(f"{said}bitsandbytes is too old for transformers; pip install -U 'packlora[quant]'")
    import bitsandbytes

    known: set[str] = getattr(bitsandbytes, "supported_torch_devices", {"cuda"})
    if device.type not in known:
        raise InputError(f"{said}bitsandbytes {bitsandbytes.__version__} has nothing for {device.type}; it has {known}")


# --- what it takes -----------------------------------------------------------------------------------------------------


def codes_in(
    skeleton: PreTrainedModel, quantization: QuantizationConfig, path: str, dtype: torch.dtype
) -> tuple[int, int]:
    """Numbers of the layers that are quantised, and the bytes that their codes take. dtype: of the run.

    Raises:
        InputError: a layer cannot be quantised so.
    """
    stored = stored_as(skeleton.config, path)
    paths = quantised_paths(skeleton) if stored is None else stored.layers(skeleton)
    numbers = held = 0
    for name in paths:
        layer: Any = skeleton.get_submodule(name)
        N, K = layer.weight.shape
        numbers += N * K
        held += _bytes_of(quantization, N, K, dtype, name) if stored is None else stored.bytes_of(N, K, dtype)
    return numbers, held


def _bytes_of(quantization: QuantizationConfig, N: int, K: int, dtype: torch.dtype, name: str) -> int:
    if quantization.method == "torchao":
        width = made_of(dtype).itemsize
        if quantization.quant_type == "float8_weight_only":
            return N * K + 4 * N
        if quantization.quant_type == "int8_weight_only":
            return N * K + width * N
        group = quantization.group_size or DEFAULT_GROUP
        if K % group:
            raise InputError(
                f"quantization: group_size {group} does not divide the {K} inputs of {name}; give one that does, of 32, 64, "
                "128 and 256, or int8_weight_only"
            )
        if dtype != torch.bfloat16:
            found = str(dtype).removeprefix("torch.")
            raise InputError(
                f"quantization: {quantization.described} is made of bfloat16, and dtype is {found}; set dtype: bfloat16"
            )
        filled = -(-N // INT4_ROWS) * INT4_ROWS * -(-K // INT4_COLUMNS) * INT4_COLUMNS
        return filled // 2 + 2 * 2 * filled // group
    if quantization.method == "int8":
        return N * K + 4 * N
    return round(N * K * (0.5 + ((1 + 4 / 256) / 64 if quantization.double_quant else 4 / 64)))


# --- loading -----------------------------------------------------------------------------------------------------------


def read_quantised(
    path: str, revision: str | None, quantization: QuantizationConfig, stored: Stored | None, dtype: torch.dtype,
    device: torch.device, trust_remote_code: bool = False, notes: list[str] | None = None,
    class_of: ClassOf = auto_class,
) -> PreTrainedModel:  # fmt: skip
    """A model on its device whose quantised layers are this package's, the rest of this dtype.

    Args:
        stored: the files have the codes; None: they are made while they are read.
        notes: gets what is to be known of it.
        class_of: see read_model.

    Raises:
        InputError: it cannot be loaded, or something of it is in codes that are not read here.
    """
    how = _loading(quantization, stored, dtype, device)
    if dtype == torch.float64:  # like read_model, which loads in float32
        how["experts_implementation"] = "eager"
    model = read_model(path, revision, made_of(dtype), trust_remote_code, class_of, **how)
    return own_layers(model, dtype, path, notes)


def read_by_library(
    path: str, revision: str | None, quantization: QuantizationConfig, stored: Stored | None, dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:  # fmt: skip
    """A model on its device whose quantised layers are the library's. Arguments and errors as those of read_quantised."""
    return read_model(path, revision, made_of(dtype), **_loading(quantization, stored, dtype, device))


def read_in_codes(
    path: str, quantization: QuantizationConfig, dtype: torch.dtype, device: torch.device, kept: list[str] | None = None
) -> tuple[PreTrainedModel, dict[str, Codes]]:
    """A model that is saved as floats as its library quantises it, ready to be saved in codes, and the codes by module path.
    The folder names its class.

    Args:
        kept: see kept_as_floats.

    Raises:
        InputError: it cannot be loaded.
    """
    how = _loading(quantization, None, dtype, device, kept)
    model = read_model(path, None, made_of(dtype), class_of=served_class, **how)
    found = {name: codes for name, _, codes in _quantised(model)}
    return model, {name: own.with_stored(own.stored.detach().as_subclass(torch.Tensor)) for name, own in found.items()}


def _loading(
    quantization: QuantizationConfig, stored: Stored | None, dtype: torch.dtype, device: torch.device,
    kept: list[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Keyword arguments of from_pretrained for a quantised model."""
    own: Any
    if stored is not None:
        own = stored.loading()
    elif quantization.method == "torchao":
        own = TorchAoConfig(_torchao_config(quantization), modules_to_not_convert=kept)
    elif quantization.method == "int8":
        own = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=kept)
    else:
        own = BitsAndBytesConfig(
            load_in_4bit=True,
            llm_int8_skip_modules=kept,
            bnb_4bit_quant_type=quantization.method,
            bnb_4bit_use_double_quant=quantization.double_quant,
            bnb_4bit_compute_dtype=dtype,
        )
    return {"device_map": {"": device}} | ({} if own is None else {"quantization_config": own})


def _torchao_config(quantization: QuantizationConfig) -> Any:
    from torchao.quantization import Float8WeightOnlyConfig, Int4WeightOnlyConfig, Int8WeightOnlyConfig

    if quantization.quant_type == "int8_weight_only":
        return Int8WeightOnlyConfig(set_inductor_config=False)
    if quantization.quant_type == "float8_weight_only":
        return Float8WeightOnlyConfig(set_inductor_config=False)
    return Int4WeightOnlyConfig(
        group_size=quantization.group_size or DEFAULT_GROUP,
        int4_packing_format="tile_packed_to_4d",
        set_inductor_config=False,
    )


def quantised_paths(model: PreTrainedModel) -> list[str]:
    """Layers of a model without weights that are quantised on request: those of its twin, where a run trains the twin."""
    twin = twin_of(model)
    if twin is not None and twin.is_trained:
        return [path for own in quantised_paths(twin.model) if (path := twin.here(own)) is not None]
    kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    return [
        path
        for path, module in model.named_modules()
        if type(module) is torch.nn.Linear and should_convert_module(path, kept)
    ]


def kept_as_floats(model: PreTrainedModel) -> list[str] | None:
    """Modules that stay in floats in a quantised model, for the library's option: the largest modules without a layer of
    quantised_paths. None where the library's default leaves out the same modules."""
    if (twin := twin_of(model)) is None or not twin.is_trained:
        return None
    within = {path[:end] for path in quantised_paths(model) for end, sign in enumerate(path + ".") if sign == "."}
    linear = [path for path, module in model.named_modules() if type(module) is torch.nn.Linear and path not in within]
    return sorted({next(one for one in _from_the_top(path) if one not in within) for path in linear})


def _from_the_top(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def made_of(dtype: torch.dtype) -> torch.dtype:
    """Dtype to which codes are dequantised in a run of this dtype; libraries support no float64."""
    return torch.float32 if dtype == torch.float64 else dtype


def own_layers(
    model: PreTrainedModel, dtype: torch.dtype, path: str = "", notes: list[str] | None = None
) -> PreTrainedModel:
    """Put layers of ours in the place of the libraries', which compute in this dtype; the rest of the model gets it.

    Args:
        path: the model, for messages.
        notes: gets what is to be known of it.

    Raises:
        InputError: something of the model is in codes that are not read here.
    """
    _check_made(model, path)
    found = list(_quantised(model))
    if notes is not None and any(codes.quantises_inputs for _, _, codes in found):
        notes.append(
            f"base_model {path!r}: its library rounds the inputs of quantised layers too; here they are multiplied as they "
            "are, with what the codes stand for"
        )
    for name, module, codes in found:
        bias = getattr(module, "bias", None)
        model.set_submodule(name, QuantizedLinear(codes, bias, dtype))
    _check_left(model, path)
    hook = model.__dict__.pop("ct_decompress_hook", None)  # would look for what is not there any more
    if hook is not None:
        hook.remove()
    for flag in FLAGS:
        model.__dict__.pop(flag, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.to(dtype)


def _quantised(model: torch.nn.Module) -> Iterator[tuple[str, Any, Codes]]:
    for path, module in model.named_modules():
        if (codes := library_codes(module)) is not None:
            yield path, module, codes


def _check_made(model: PreTrainedModel, path: str) -> None:
    """Raises InputError for a layer of bitsandbytes that has got no codes: the files hold floats where codes were announced. An
    output layer that is the embedding has none, and becomes a layer of floats."""
    for name, module in list(model.named_modules()):
        kind, weight = type(module), getattr(module, "weight", None)
        if not kind.__module__.startswith("bitsandbytes.") or kind.__name__ not in ("Linear4bit", "Linear8bitLt"):
            continue
        of_8_bits = (getattr(weight, "SCB", None), module.state.SCB) if kind.__name__ == "Linear8bitLt" else ()
        if any(own is not None for own in of_8_bits or (state_of(module),)):
            continue
        if weight is model.get_input_embeddings().weight:
            plain = torch.nn.Linear(module.in_features, module.out_features, module.bias is not None, "meta")
            plain.weight, plain.bias = weight, module.bias
            model.set_submodule(name, plain)
        else:
            raise InputError(
                f"base_model {path!r}: config.json says that {name} is in codes of bitsandbytes, and the files hold floats; "
                "mend its quantization_config, or take a whole copy of the model"
            )


def _check_left(model: PreTrainedModel, path: str) -> None:
    """Raise InputError for a layer whose codes were not read."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            continue
        codes = [leaf for leaf, own in module.named_parameters(recurse=False) if own.dtype.itemsize == 1]
        kind = type(module)
        if codes and hasattr(module, "num_experts"):
            raise InputError(
                f"base_model {path!r}: {name} is {kind.__qualname__}, experts in codes, which are not read here; take a "
                "checkpoint of the model that has them in bfloat16"
            )
        if codes or hasattr(module, "quantization_scheme") or kind.__module__.startswith("gptqmodel."):
            raise InputError(
                f"base_model {path!r}: {name} is a quantised {kind.__module__}.{kind.__qualname__}, which is not read here; "
                "linear layers of bitsandbytes, torchao, GPTQModel, compressed-tensors and FP8 in blocks are"
            )


def dequantised(weight_NK: torch.Tensor, quantization: QuantizationConfig, dtype: torch.dtype) -> torch.Tensor:
    """Values that a run of this dtype computes with in place of a weight, once it is quantised: float32, on the weight's
    device."""
    return codes_made_of(weight_NK, quantization, dtype).values(made_of(dtype)).float()


def codes_made_of(weight_NK: torch.Tensor, quantization: QuantizationConfig, dtype: torch.dtype) -> Codes:
    """The codes that a run of this dtype has of a weight, on its device."""
    weight_NK = weight_NK.to(made_of(dtype))
    if quantization.method == "torchao":
        from torchao.quantization import quantize_

        layer = torch.nn.Linear(weight_NK.shape[1], weight_NK.shape[0], False, "meta")
        layer.weight = torch.nn.Parameter(weight_NK, requires_grad=False)
        quantize_(layer, _torchao_config(quantization))
        made = library_codes(layer)
        assert made is not None
        return made
    from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit

    if quantization.method == "int8":
        stored, largest_N, _ = int8_vectorwise_quant(weight_NK.half())
        return EightBit(stored, largest_N)
    stored, state = quantize_4bit(
        weight_NK.contiguous(), quant_type=quantization.method, compress_statistics=quantization.double_quant
    )
    return FourBit(stored, state)
