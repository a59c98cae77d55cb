"""Parts models and layers of `python -m benchmarks small`: each case in one of the modes of modes.py, a row for each.

Shapes: T tokens, K inputs, N outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks import dora_layer, layer
from benchmarks.layer import accelerated, work
from benchmarks.model import TINY, adapted_copy, build
from benchmarks.modes import compile_each, in_mode, modes, started
from benchmarks.options import Options
from benchmarks.peers.peft import check_close, peft_model
from benchmarks.studies.short_jobs import SHAPES
from packlora.plans.timing import Contender, Timings, Work, paired

CONTENDERS = ["frozen", "packlora", "peft_bf16"]
RANK = 16
VOCABULARY = 512
"""No head and no loss take part."""
WHOLE: list[tuple[str, str, int | None, int, bool]] = [
    ("8x0.6B", "0.6B", 8, 1, False),
    ("8x0.6B", "0.6B", 8, 1, True),
    ("8x0.6B", "0.6B", 8, 4, False),
    ("4x8B", "8B", 4, 1, False),
    ("4x8B", "8B", 4, 1, True),
    ("0.6B", "0.6B", None, 1, False),
    ("1.7B", "1.7B", None, 1, False),
    ("0.6B", "0.6B", None, 4, False),
]
"""Name, shape, layers, samples of 2048 tokens, DoRA; the cheapest first."""
COMPILED_WHOLE = ("8x0.6B", 1, False)
"""Name, samples and DoRA of the case that is compiled as one graph. Of the others the decoder layers are compiled, which share
a graph: as one, 28 layers take minutes in each mode and for each contender."""


# --- whole models ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelCase:
    """name: of the shape, with its number of layers before it where they are not all. layers: None for all."""

    name: str
    shape: str
    layers: int | None
    samples: int
    length: int
    dora: bool
    mode: str
    part: str = "models"

    @property
    def of(self) -> str:
        """The case, whatever the mode."""
        return f"model {self.name} {self.samples}x{self.length} {'dora' if self.dora else 'lora'}_r{RANK}"

    @property
    def label(self) -> str:
        return f"{self.of} {self.mode}"

    @property
    def by_layer(self) -> bool:
        """Whether decoder layers are compiled, not the model."""
        return (self.name, self.samples, self.dora) != COMPILED_WHOLE


def model_cases(options: Options) -> list[ModelCase]:
    """All cases, or the subset of `quick`; sizes of a toy on a CPU."""
    known = modes(options.device)
    if options.tiny:
        return [ModelCase("tiny", "0.6B", 1, 2, 16, False, mode) for mode in known]
    chosen = WHOLE[:1] if options.quick else WHOLE
    return [
        ModelCase(name, shape, layers, samples, 2048, dora, mode)
        for name, shape, layers, samples, dora in chosen
        for mode in known
    ]


def decoder(case: ModelCase, tiny: bool, device: torch.device) -> nn.Module:
    """The frozen causal language model of the case."""
    _, kind, make, values = SHAPES[case.shape]
    values = {**values, **TINY, "head_dim": 16} if tiny else values
    depth = values["num_hidden_layers"] if case.layers is None else case.layers
    config = kind(
        **{**values, "vocab_size": VOCABULARY, "num_hidden_layers": depth}, attn_implementation="sdpa", use_cache=False
    )
    return build(config, device, make)


def model_contender(
    name: str, case: ModelCase, base: nn.Module, device: torch.device, seconds: dict[str, float]
) -> Contender:
    """The decoder's layers from embeddings to hidden states, and back from an upstream gradient."""

    def make() -> tuple[Work, Callable[[], None]]:
        model, note = adapted_copy(name, base, RANK, 0.0, dora=case.dora)
        inner = (model if name == "frozen" else model.get_base_model()).model
        call = inner if case.by_layer else in_mode(inner, case.mode, device)
        if case.by_layer:
            compile_each(inner.layers, case.mode, device)
        torch.manual_seed(0)
        shape = (case.samples, case.length, model.get_input_embeddings().embedding_dim)
        x, dy = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        x.requires_grad_()
        positions = torch.arange(case.length, device=device).expand(case.samples, -1).contiguous()

        def forward(x: torch.Tensor) -> torch.Tensor:
            out = call(inputs_embeds=x, position_ids=positions, attention_mask=None, use_cache=False)
            return out.last_hidden_state  # type: ignore[no-any-return]

        return work(forward, x, dy, [p for p in model.parameters() if p.requires_grad], note=note), lambda: None

    return started(name, make, case.mode, device, seconds)


def measure_model(case: ModelCase, names: Sequence[str], options: Options) -> tuple[Timings, dict[str, float]]:
    """Timings, and the seconds that compiling took."""
    base, seconds = decoder(case, options.tiny, options.device), dict[str, float]()
    contenders = [model_contender(name, case, base, options.device, seconds) for name in names]
    timings = paired(
        contenders, options.device, seconds=0.0 if options.tiny else 1.5, rounds=(5, 30), flush=False, wall=True
    )
    return timings, seconds


# --- single layers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerCase:
    """inner: the case of `bench layer`, or of `bench dora`."""

    inner: layer.Case | dora_layer.Case
    mode: str
    part: str = "layers"

    @property
    def dora(self) -> bool:
        return isinstance(self.inner, dora_layer.Case)

    @property
    def of(self) -> str:
        """The case, whatever the mode."""
        return f"{'dora' if self.dora else 'lora'} {self.inner.label.removeprefix('layer ')}"

    @property
    def label(self) -> str:
        return f"{self.of} {self.mode}"


def layer_cases(options: Options) -> list[LayerCase]:
    """Those of `bench layer` and of the layers in `bench dora`, each in every mode."""
    lora, dora = layer.cases(options), dora_layer.cases(options)
    if options.tiny:
        lora, dora = lora[-1:], dora[:1]
    known = modes(options.device)
    return [
        *(LayerCase(case, mode) for case in lora for mode in known),
        *(LayerCase(case, mode) for case in dora for mode in known),
    ]


def compare_with_peft(
    call: Callable[[torch.Tensor], torch.Tensor], parameters: Sequence[nn.Parameter], inputs: dora_layer.Inputs,
    magnitude_N: torch.Tensor | None,
) -> None:  # fmt: skip
    """What is timed against PEFT's layer as it is. Raises AssertionError where they differ by more than rounding."""
    lora, results = inputs.lora, []
    _, one, own = peft_model(lora.weight_NK, lora.A_rK, lora.B_Nr, 0.0, False, magnitude_N)
    for made, adapter in ((call, parameters), (one, own)):
        y = made(lora.x)
        results.append([value.clone() for value in (y.detach(), *torch.autograd.grad(y, [lora.x, *adapter], lora.dy))])
    check_close(*results)


def layer_contender(name: str, case: LayerCase, inputs: dora_layer.Inputs, seconds: dict[str, float]) -> Contender:
    lora, device = inputs.lora, inputs.lora.x.device
    magnitude = inputs.magnitude_N if case.dora else None

    def make() -> tuple[Work, Callable[[], None]]:
        model, one, parameters = peft_model(lora.weight_NK, lora.A_rK, lora.B_Nr, lora.case.dropout, False, magnitude)
        note = accelerated(name, model, {"x": lora.x.detach()[:1, :2]}) if name == "packlora" else ""
        call = in_mode(one, case.mode, device)

        def check() -> None:
            if name == "packlora" and not lora.case.dropout:
                compare_with_peft(call, parameters, inputs, magnitude)

        return work(call, lora.x, lora.dy, parameters, note=note), check

    return started(name, make, case.mode, device, seconds)


def measure_layer(case: LayerCase, names: Sequence[str], options: Options) -> tuple[Timings, dict[str, float]]:
    """Timings, and the seconds that compiling took."""
    inner, seconds = case.inner, dict[str, float]()
    inputs = dora_layer.Inputs.random(
        dora_layer.Case(inner.K, inner.N, inner.T, inner.rank, inner.dropout), options.device
    )
    contenders = [layer_contender(name, case, inputs, seconds) for name in names if name != "frozen"]
    timings = paired(contenders, options.device, seconds=0.0 if options.tiny else 0.1, rounds=(5, 15), wall=True)
    return timings, seconds
