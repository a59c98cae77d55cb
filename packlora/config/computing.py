"""Keys of how frozen weights are stored, and how layers and microbatches are computed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from packlora.config.shared import MOST_PATTERNS, Pattern, Strict


class QuantizationConfig(Strict):
    """Quantisation of the frozen linear layers; a text in its place is its `method`."""

    method: Literal["nf4", "fp4", "int8", "torchao", "gptq", "awq", "compressed-tensors", "fp8"]
    """Format of the codes. bitsandbytes: nf4 and fp4, 4 bits a number, with a scale for each 64 of them; int8, 8 bits, with a
    scale for each output. torchao: as quant_type says. The others are only for a base_model that is saved so, and may be left
    out."""
    double_quant: bool = False
    """Quantise the scales too, to 8 bits (nf4 and fp4)."""
    quant_type: Literal["int4_weight_only", "int8_weight_only", "float8_weight_only"] | None = None
    """Format of torchao's codes: 4 bits a number, with a scale and a zero for each group, on CUDA; or 8 bits with a scale for
    each output."""
    group_size: Literal[32, 64, 128, 256] | None = None
    """Numbers that share a scale under torchao's int4_weight_only; null: 128."""

    @model_validator(mode="after")
    def _consistent(self) -> QuantizationConfig:
        if self.double_quant and self.method not in ("nf4", "fp4"):
            raise ValueError(f"double_quant is true, but the scales of {self.method} are not quantised; leave it out")
        if (self.method == "torchao") != (self.quant_type is not None):
            if self.quant_type is not None:
                raise ValueError(f"quant_type is torchao's, but method is {self.method}; leave it out")
            kinds = "int4_weight_only, int8_weight_only or float8_weight_only"
            raise ValueError(f"method is torchao, so quant_type is needed: {kinds}")
        if self.group_size is not None and self.quant_type != "int4_weight_only":
            raise ValueError("group_size is for torchao's int4_weight_only; leave it out")
        return self

    @property
    def described(self) -> str:
        """Description of the codes in words, for messages."""
        grouped = "" if self.quant_type != "int4_weight_only" else f", group_size {self.group_size or 128}"
        kind = "" if self.quant_type is None else f" {self.quant_type}{grouped}"
        return self.method + kind + " with double_quant" * self.double_quant


class PlansConfig(Strict):
    """Computation of layers with adapters; a text in its place is its `plan`."""

    plan: str | Annotated[dict[Pattern, str], Field(max_length=MOST_PATTERNS)] = "measured"
    """measured: what `packlora tune` measured on this device, else a cost model on a GPU, the plain chain on a CPU. flops: the
    fewest floating-point operations. Or a plan's name, or a mapping of patterns of module paths to these."""
    lossy: bool = False
    """measured and flops may choose plans that merge weights, and these may be named: they round more than the plain chain."""
    prefer: Literal["time", "memory"] = "time"
    """memory: measured and flops do not keep S, tokens x rank, for the backward where making it again costs little."""


class ScheduleConfig(Strict):
    """Packing of samples into microbatches; it decides speed, not results."""

    method: Literal["auto", "greedy", "milp", "solo"] = "auto"
    """solo: jobs never share a microbatch. greedy, auto: heuristics. milp: integer programs, too."""
    padding_multiple: int = Field(1, ge=1, le=1)
    """Multiple to which sequences are padded: nothing is padded; the key is accepted for older run files."""
    time_limit_s: float = Field(10, ge=1e-3, le=1e6)
    """Emergency stop of an integer program; it normally ends earlier, at a number of nodes."""
