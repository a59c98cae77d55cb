"""Weights as bitsandbytes, torchao, GPTQModel, compressed-tensors and transformers store them, and the dense weight of each.

`library_codes` reads a layer of one of these libraries. The dense weight is what the library's own function makes of the codes;
where it has none (torchao's packed int4) it is the layer's product with the identity, whose sums have one term and so round
nothing. FP8 in blocks is the product of codes and scales in float32, which is the whole format.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from packlora.codes.weight import Codes
from packlora.ops.gpu import runs_triton
from packlora.ops.stamp import plain_reads

LARGEST_CODE = 127
IDENTITY_ROWS = 1024
"""Rows of the identity matrix that are multiplied at a time."""
TORCHAO_TYPES = {
    "Int8Tensor": "int8_weight_only", "Float8Tensor": "float8_weight_only", "Int4TilePackedTo4dTensor": "int4_weight_only",
}  # fmt: skip
"""Names in a run file of the tensor classes of torchao."""

Tensors = Mapping[str, torch.Tensor]


class FourBit:
    """Two codes a byte, a scale for each block of them; the scales may be quantised themselves. state: a QuantState."""

    quantises_inputs = False

    def __init__(self, stored: torch.Tensor, state: Any) -> None:
        self.stored, self.state = stored, state
        self.settings: dict[str, Any] = {"method": str(state.quant_type), "double_quant": bool(state.nested)}

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.state.shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"": self.stored, **self.state.as_dict(packed=True)}

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        with plain_reads():
            if self.stored.is_cuda and runs_triton(self.stored.device):
                from packlora.codes.four_bit import dense

                return dense(self.stored, self.state, dtype, lambda: self._by_library(dtype).flatten()).view(self.shape)
        return self._by_library(dtype)

    def _by_library(self, dtype: torch.dtype) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        state = copy.copy(self.state)
        state.dtype = torch.float32 if dtype == torch.float64 else dtype
        # Blocks go on from row to row. bitsandbytes' kernel for CPUs (0.50) begins anew in each row where K is a multiple of 16
        # and not of 64, and so takes wrong scales: of SigLIP's 4304 inputs, for one.
        state.shape = torch.Size([self.state.shape.numel()])
        W_NK: torch.Tensor = dequantize_4bit(self.stored.reshape(-1, 1), state)
        return W_NK.view(self.shape).to(dtype)

    def with_stored(self, stored: torch.Tensor) -> FourBit:
        self.state.to(stored.device)
        return FourBit(stored, self.state)


class EightBit:
    """A code a byte, [N, K], and the largest value of each row, [N] in float32."""

    quantises_inputs = False

    def __init__(self, stored: torch.Tensor, largest_N: torch.Tensor) -> None:
        self.stored, self.largest_N = stored, largest_N
        self.settings: dict[str, Any] = {"method": "int8", "double_quant": False}

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape  # type: ignore[return-value]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"": self.stored, "SCB": self.largest_N}

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        return self.stored.to(dtype, copy=True).mul_((self.largest_N * (1.0 / LARGEST_CODE)).unsqueeze(1))

    def with_stored(self, stored: torch.Tensor) -> EightBit:
        return EightBit(stored, self.largest_N.to(stored.device))


class LibraryCodes:
    """The weight of a layer of a library. stored: the tensor that most of its memory is, as integers."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        tensors: Tensors,
        shape: tuple[int, int],
        make: Callable[[Tensors], torch.Tensor],
        quantises_inputs: bool = False,
    ) -> None:
        """tensors: all that the weight is made of. make: gives W [N, K], newly made, of tensors by the same names."""
        self.settings, self.shape, self.quantises_inputs = dict(settings), shape, quantises_inputs
        self._make, self._main = make, max(tensors, key=lambda name: tensors[name].nbytes)
        self._rest = {name: tensor.detach() for name, tensor in tensors.items() if name != self._main}
        self._dtype = tensors[self._main].dtype
        main = tensors[self._main].detach()
        self.stored = main.view(torch.uint8) if main.is_floating_point() else main

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"": self.stored, **self._rest}

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        tensors = {**self._rest, self._main: self.stored.detach().view(self._dtype)}
        return self._make(tensors).to(dtype).contiguous()

    def with_stored(self, stored: torch.Tensor) -> LibraryCodes:
        rest = {name: tensor.to(stored.device) for name, tensor in self._rest.items()}
        tensors = {**rest, self._main: stored.detach().view(self._dtype)}
        other = LibraryCodes(self.settings, tensors, self.shape, self._make, self.quantises_inputs)
        other.stored = stored
        return other


def library_codes(module: torch.nn.Module) -> Codes | None:
    """The weight of a layer whose library is known here; None of any other module, a plain linear layer among them."""
    for read in READERS:
        if (found := read(module)) is not None:
            return found
    return None


def by_identity(
    product: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """W [N, K] of a layer that only multiplies: product(x) is x W' for x [T, K] of this dtype."""
    N, K = shape
    W_KN = torch.empty(K, N, dtype=dtype, device=device)
    for start in range(0, K, IDENTITY_ROWS):
        stop = min(start + IDENTITY_ROWS, K)
        rows = torch.zeros(stop - start, K, dtype=dtype, device=device)
        rows[:, start:stop].fill_diagonal_(1)
        W_KN[start:stop] = product(rows)
    return W_KN.t()


def _is(module: object, library: str, *names: str) -> bool:
    return _named(type(module), library, *names)


def _named(kind: type, library: str, *names: str) -> bool:
    return kind.__module__.partition(".")[0] == library and (not names or kind.__name__ in names)


# --- libraries ---------------------------------------------------------------------------------------------------------


def _bitsandbytes(module: torch.nn.Module) -> Codes | None:
    known = any(_named(kind, "bitsandbytes", "Linear4bit", "Linear8bitLt") for kind in type(module).__mro__)
    return codes_of(module) if known else None


def codes_of(module: Any) -> Codes:
    """The weight of a bitsandbytes Linear4bit or Linear8bitLt that is quantised and on its device."""
    weight, state = module.weight, state_of(module)
    if state is not None:
        return FourBit(weight, state)
    largest_N = module.state.SCB if module.state.SCB is not None else weight.SCB
    return EightBit(weight if module.state.CB is None else module.state.CB, largest_N)


def state_of(module: Any) -> Any:
    """The QuantState of a bitsandbytes Linear4bit; None of a layer that has none. FSDP takes it off the weight."""
    own = getattr(module.weight, "quant_state", None)
    return getattr(module, "quant_state", None) if own is None else own


def _torchao(module: torch.nn.Module) -> LibraryCodes | None:
    weight: Any = module._parameters.get("weight")
    if weight is None or not _is(weight, "torchao") or weight.ndim != 2:
        return None
    kind, shape, dtype = type(weight), tuple(weight.shape), weight.dtype
    names, attributes = weight.__tensor_flatten__()
    settings = {"method": "torchao", "quant_type": TORCHAO_TYPES.get(kind.__name__, kind.__name__)}
    if settings["quant_type"] == "int4_weight_only":
        settings["group_size"] = weight.block_size[-1]
    stride = weight.stride()

    def make(tensors: Tensors) -> torch.Tensor:
        own = kind.__tensor_unflatten__(tensors, attributes, shape, stride)
        try:
            made: torch.Tensor = own.dequantize()
        except NotImplementedError:
            device = own.device
            made = by_identity(lambda x: torch.nn.functional.linear(x, own), shape, dtype, device)
        return made

    inputs = getattr(weight, "act_quant_kwargs", None) is not None
    return LibraryCodes(settings, {name: getattr(weight, name) for name in names}, shape, make, inputs)


def _gptq(module: torch.nn.Module) -> LibraryCodes | None:
    """Codes of GPTQModel's torch kernel; its other kernels store codes in layouts of their own."""
    if not _is(module, "gptqmodel", "TorchLinear", "TorchQuantLinear"):
        return None
    found: Any = module
    dequantize = super(type(found), found).dequantize_weight.__func__  # not the compiled one, which keeps what it makes
    holder = copy.copy(found)
    holder._buffers = {}

    def make(tensors: Tensors) -> torch.Tensor:
        own = copy.copy(holder)
        own._buffers = dict(tensors)
        W_KN: torch.Tensor = dequantize(own)
        return W_KN[: found_shape[1]].t()

    found_shape = (found.out_features, found.in_features)
    tensors = {name: buffer for name, buffer in found._buffers.items() if buffer is not None and name != "bias"}
    return LibraryCodes({"method": "gptq"}, tensors, found_shape, make)


def _awq(module: torch.nn.Module) -> LibraryCodes | None:
    if not _is(module, "gptqmodel", "AwqTorchLinear", "AwqTorchQuantLinear"):
        return None
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    found: Any = module
    bits, group_size = found.bits, found.group_size

    def make(tensors: Tensors) -> torch.Tensor:
        W_KN: torch.Tensor = dequantize_gemm(**tensors, bits=bits, group_size=group_size)
        return W_KN.t()

    tensors = {name: getattr(found, name) for name in ("qweight", "qzeros", "scales")}
    return LibraryCodes({"method": "awq"}, tensors, (found.out_features, found.in_features), make)


def _compressed_tensors(module: torch.nn.Module) -> LibraryCodes | None:
    scheme: Any = getattr(module, "quantization_scheme", None)
    status = getattr(module, "quantization_status", None)
    if not isinstance(module, torch.nn.Linear) or scheme is None or getattr(status, "value", status) != "compressed":
        return None
    from compressed_tensors.compressors import BaseCompressor

    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    shape = (module.out_features, module.in_features)
    names = [name for name in module._parameters | module._buffers if name.startswith("weight")]

    def make(tensors: Tensors) -> torch.Tensor:
        told = {**tensors, "weight_shape": torch.tensor(shape)} if packed else dict(tensors)
        made: torch.Tensor = compressor.decompress(told, scheme)["weight"]
        return made

    packed = "weight_shape" in names  # kept on the host, which reads it
    tensors: dict[str, Any] = {name: getattr(module, name) for name in names if name != "weight_shape"}
    inputs = scheme.input_activations is not None or scheme.output_activations is not None
    return LibraryCodes({"method": "compressed-tensors"}, tensors, shape, make, inputs)


def _blocks_of_fp8(module: torch.nn.Module) -> LibraryCodes | None:
    found: Any = module
    if not _is(found, "transformers", "FP8Linear") or found.weight.dtype != torch.float8_e4m3fn:
        return None
    block, shape = found.block_size, tuple(found.weight.shape)

    def make(tensors: Tensors) -> torch.Tensor:
        W_NK, scales = tensors["weight"].float(), tensors["weight_scale_inv"].float()
        if block is None:
            return W_NK.mul_(scales)
        rows, columns = block
        scales = scales.repeat_interleave(rows, 0)[: shape[0]]
        whole = shape[1] // columns
        W_NK[:, : whole * columns].unflatten(1, (whole, columns)).mul_(scales[:, :whole, None])
        W_NK[:, whole * columns :].mul_(scales[:, whole:])
        return W_NK

    tensors = {name: getattr(found, name) for name in ("weight", "weight_scale_inv")}
    return LibraryCodes({"method": "fp8"}, tensors, shape, make, quantises_inputs=True)


READERS = (_bitsandbytes, _torchao, _gptq, _awq, _compressed_tensors, _blocks_of_fp8)
