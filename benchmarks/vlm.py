"""`benchmarks vlm`: a vision-language model with DoRA on all linear layers, against the same model frozen and under PEFT.

Qwen3-VL-8B's shape with random weights, one sample of an image and a text, DoRA of rank 384, 512 and 768 on the vision tower
and the language model, forward alone and forward with backward, adapters in bfloat16 and in float32. All contenders of a case
stand in one process over the same frozen weights; a contender's memory is counted as if it stood there alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.layer import accelerated, show
from benchmarks.model import away_from_start, build, peak_gib, shared_copy
from benchmarks.model import table as table
from benchmarks.options import Options, Outcome, choose
from benchmarks.peers.peft import under_autocast
from packlora.plans.timing import Contender, Timings, Work, paired

RANKS = (384, 512, 768)
CONTENDERS = ["frozen", "packlora", "peft"]
LAYERS = 8
TEXT: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True
    },
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16, "out_hidden_size": 4096,
    "num_position_embeddings": 2304, "spatial_merge_size": 2,
}  # fmt: skip
TINY_TEXT = TEXT | {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [4, 2, 2]},
}  # fmt: skip
TINY_VISION = VISION | {
    "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
IMAGE_TOKEN = 7
PROTOCOL = (
    "Qwen3-VL-8B's shape ({layers} layers of the language model and as many blocks of the vision tower), random bfloat16 "
    "weights, one sample: an image of {grid} by {grid} patches, a quarter as many tokens, and {words} random tokens of text, "
    "the loss on the last {labels}. DoRA on all linear layers of both (all-linear), alpha = 2 r, no dropout, B and "
    "magnitudes away from their initial values. forward: without gradients, in eval mode; step: forward and backward, no "
    "optimizer step. bf16: bfloat16 adapters; fp32: PEFT's default float32 adapters under torch.autocast. packlora: "
    "packlora.accelerate on the PEFT model, without autocast; its DoRA norms are made once for the values that there are, "
    "PEFT's in every forward. frozen: no adapter; in a step only the embeddings' output wants a gradient. Contenders run in "
    "turn inside one loop over the same frozen weights, random order each round, CUDA events, medians, ratios within a round. "
    "gib: peak of one run, with the frozen weights and what the contender itself keeps, without what the others keep."
)


@dataclass(frozen=True, slots=True)
class Case:
    """grid: patches of the image by its side. wide: adapters in float32. backward: else the forward alone."""

    rank: int
    wide: bool
    backward: bool
    config: Qwen3VLConfig
    grid: int
    words: int
    labels: int

    @property
    def regime(self) -> str:
        return "fp32" if self.wide else "bf16"

    @property
    def label(self) -> str:
        return f"{'step' if self.backward else 'forward'} dora_r{self.rank} {self.regime}"


def cases(options: Options) -> list[Case]:
    """All cases, or the subset of `quick`; sizes of a toy on a CPU."""
    layers = options.layers or (2 if options.tiny else 4 if options.quick else LAYERS)
    text, vision = (TINY_TEXT, TINY_VISION) if options.tiny else (TEXT, VISION)
    config = Qwen3VLConfig(
        text_config=text | {"num_hidden_layers": layers, "use_cache": False},
        vision_config=vision | {"depth": layers, "deepstack_visual_indexes": list(range(min(3, layers)))},
        image_token_id=IMAGE_TOKEN, attn_implementation="sdpa",
    )  # fmt: skip
    ranks: tuple[int, ...] = (24,) if options.tiny else RANKS[:1] if options.quick else RANKS
    sizes = (8, 24, 8) if options.tiny else (64, 3072, 1024)
    return [Case(r, wide, back, config, *sizes) for back in (False, True) for wide in (False, True) for r in ranks]


def inputs_of(case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    """One sample: words, an image, words."""
    patches, vision = case.grid**2, case.config.vision_config
    image = torch.full((patches // vision.spatial_merge_size**2,), IMAGE_TOKEN)
    words = torch.randint(IMAGE_TOKEN + 1, case.config.text_config.vocab_size, (case.words,))
    ids = torch.cat([words[:4], image, words[4:]])[None]
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    found = {
        "input_ids": ids, "mm_token_type_ids": (ids == IMAGE_TOKEN).int(), "pixel_values": torch.randn(patches, width),
        "image_grid_thw": torch.tensor([[1, case.grid, case.grid]]),
    }  # fmt: skip
    return {
        name: tensor.to(device, torch.bfloat16 if tensor.is_floating_point() else None)
        for name, tensor in found.items()
    }


def contender(name: str, base: nn.Module, inputs: dict[str, torch.Tensor], case: Case) -> Contender:
    """One of CONTENDERS."""

    def make() -> Work:
        model, note = shared_copy(base), ""
        if name != "frozen":
            model = adapted(model, case)
            if name == "packlora":
                note = accelerated(name, model)
        model.train(case.backward)
        inner = model if name == "frozen" else model.base_model.model
        if case.backward:
            inner.enable_input_require_grads()
        device = inputs["input_ids"].device

        def plain(given: Any) -> Any:
            return inner(**given)

        call: Callable[..., Any] = under_autocast(plain, device) if name == "peft" and case.wide else plain
        labels = inputs["input_ids"][0, -case.labels :]

        def step() -> None:
            with torch.set_grad_enabled(case.backward):
                logits = call(inputs | {"logits_to_keep": case.labels + 1}).logits[0, :-1]
                loss = nn.functional.cross_entropy(logits.float(), labels)
            if case.backward:
                loss.backward()

        def clear() -> None:
            model.zero_grad(set_to_none=True)

        return Work(step, clear, note)

    return Contender(name, make)


def adapted(model: Any, case: Case) -> Any:
    """The model under PEFT with DoRA on all linear layers, B not zero and magnitudes not the norms of the weights."""
    config = LoraConfig(r=case.rank, lora_alpha=2 * case.rank, target_modules="all-linear", use_dora=True)
    with next(model.parameters()).device:
        return away_from_start(get_peft_model(model, config, autocast_adapter_dtype=case.wide))


def measured_row(case: Case, base: nn.Module, names: list[str], device: torch.device) -> dict[str, Any]:
    """A case's row of the results; prints it."""
    torch.manual_seed(1)
    inputs = inputs_of(case, device)
    seconds, rounds = (6.0, (6, 40)) if device.type == "cuda" else (0.1, (2, 4))
    parts = [contender(name, base, inputs, case) for name in names]
    timings: Timings = paired(parts, device, seconds=seconds, rounds=rounds, warmup=2)
    stored = sum(parameter.nbytes for parameter in base.parameters())
    row = {
        "case": case.label, "r": case.rank, "regime": case.regime, "backward": case.backward,
        "layers": case.config.text_config.num_hidden_layers, "T": inputs["input_ids"].numel(), "patches": case.grid**2,
        **timings.row(), "gib": peak_gib(timings, stored), "vs_peft": timings.ratio("peft", "packlora"),
    }  # fmt: skip
    show(row, device)
    return row


def run(options: Options) -> Outcome:
    """Measure; prints a line per case."""
    wanted = cases(options)
    names, chosen = choose(options.only, CONTENDERS, [], wanted)
    rows = list(options.kept)
    base = build(wanted[0].config, options.device, Qwen3VLForConditionalGeneration)
    for case in options.each(chosen, rows):
        rows.append(measured_row(case, base, names, options.device))
    first = wanted[0]
    layers = first.config.text_config.num_hidden_layers
    protocol = PROTOCOL.format(layers=layers, grid=first.grid, words=first.words, labels=first.labels)
    return Outcome(protocol, rows, options.keys(summary(rows)), table(rows))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """PEFT's time over packlora's, the least over ranks and regimes, and by these; GiB over PEFT's, the most. None where one
    could not be measured."""
    out: dict[str, Any] = {}
    for name, backward in (("forward", False), ("step", True)):
        some = [row for row in rows if row["backward"] is backward]
        ratios = [row["vs_peft"] for row in some]
        out[f"{name}_vs_peft"] = None if not ratios or None in ratios else min(ratios)
        for row in some:
            key = f"{name}_r{row['r']}_{row['regime']}"
            out[f"{key}_vs_peft"], out[f"{key}_over_frozen"] = row["vs_peft"], row["over_frozen"].get("packlora")
    pairs = [(row["gib"].get("packlora"), row["gib"].get("peft")) for row in rows]
    more = [None if own is None or peer is None else own - peer for own, peer in pairs]
    known = [one for one in more if one is not None]
    out["peak_gib_minus_peft_max"] = max(known) if known and len(known) == len(more) else None
    return out
