"""The proof that samples with images may be packed, as base/proof.py gives it for texts: packed samples must have the logits
that the untouched model gives each one alone, and the rows of an image must lie together in all linear layers and convolutions
of a vision tower.

Shapes: T tokens of a sample, n rows of images that a layer is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image as pillow
from transformers import PreTrainedModel

from packlora.base.packing import decoder_of, packed_logits
from packlora.base.proof import PROBE_ERROR, cannot_be_packed, difference
from packlora.base.shape import vocabulary
from packlora.errors import InputError
from packlora.images.vision import ImageTensors, Vision, joined_positions, on_device
from packlora.ops.lora_linear.frozen import exact_products
from packlora.ops.modules import beside_decoder
from packlora.ops.wide import widened

SIZES = ((96, 64), (64, 112), (80, 80))
"""Widths and heights of the probes' images; the second sample has two."""
WORDS = 12
"""Tokens before and after an image."""

Rows = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Sample:
    """ids: int64 [T]."""

    ids: np.ndarray
    images: ImageTensors | None


@dataclass(frozen=True, slots=True)
class OwnImages:
    """Results of the model as transformers runs it.

    logits: float64 [T, V] of each sample by itself. rows: for each sample with images, one number for each row [n] of every
    linear layer and convolution outside the language model, by layer."""

    samples: tuple[_Sample, ...]
    logits: tuple[torch.Tensor, ...]
    rows: tuple[Rows, ...]


@exact_products()
@torch.no_grad()
def own_images(model: PreTrainedModel, path: str, vision: Vision) -> OwnImages:
    """Run the untouched model on each probe alone. Raises InputError where it does not run."""
    model.eval()
    vision.bind(model)
    samples, logits, rows = _probes(model, vision), [], []
    with cannot_be_packed(model, path, "is not run by transformers on images"):
        for sample in samples:
            ids_T = torch.from_numpy(sample.ids).to(model.device)
            more = {} if sample.images is None else on_device(sample.images.tensors, model.device, model.dtype)
            with _watched(model) as found:
                told = vision.as_transformers_runs(model, ids_T)
                output = model(input_ids=ids_T[None], use_cache=False, **told, **more)
            logits.append(widened(output.logits[0]))
            if sample.images is not None:
                rows.append(found)
    return OwnImages(samples, tuple(logits), tuple(rows))


@exact_products()
@torch.no_grad()
def check_images(model: PreTrainedModel, own: OwnImages, path: str, vision: Vision) -> None:
    """Raise InputError if packed samples with images, and one without images between them, give other results than each by
    itself."""
    decoder = {*decoder_of(model).modules()}
    if decoder.isdisjoint(map(model.get_submodule, beside_decoder(model))):
        raise InputError(
            f"base_model {path!r}: a {model.config.model_type} model puts images into its texts in one forward with its output "
            "layer, which is not taken apart in this version; give rows without images"
        )
    vision.example = packed_arguments(own.samples, vision, model)
    with cannot_be_packed(model, path), _watched(model) as found:
        example = dict(vision.example)
        ids, positions, lengths = (example.pop(name) for name in ("input_ids", "position_ids", "sample_lengths"))
        example.pop("use_cache")
        rows_L = torch.arange(ids.shape[1], device=ids.device)
        position_ids = positions[0] if positions.ndim == 2 else positions[:, 0]
        together = widened(packed_logits(model, ids[0], position_ids, lengths, rows_L, example))
    what = f"base_model {path!r}: packlora cannot train a {model.config.model_type} model on images: "
    parts = together.split(list(lengths))
    error = max(difference(got, want.to(got.device), model.dtype) for got, want in zip(parts, own.logits, strict=True))
    if not error < PROBE_ERROR[model.dtype]:
        raise InputError(what + f"its own logits of samples with images differ by {error:.1%} from packed ones")
    for layer, numbers in found.items():
        alone = torch.cat([rows[layer] for rows in own.rows]) if all(layer in rows for rows in own.rows) else None
        if alone is None or not difference(numbers[:, None], alone[:, None], model.dtype) < PROBE_ERROR[model.dtype]:
            raise InputError(what + f"in {layer} the rows of an image do not lie together")


def packed_arguments(samples: Sequence[_Sample], vision: Vision, model: PreTrainedModel) -> dict[str, Any]:
    """Keyword arguments of the packed model for samples of which some have images."""
    images = ImageTensors.joined([sample.images for sample in samples if sample.images is not None])
    positions = joined_positions([vision.positions(sample.ids, sample.images) for sample in samples])
    blocks, start = [], 0
    for sample in samples:
        own = vision.blocks(sample.ids, start)
        blocks += [] if own is None else [own]
        start += len(sample.ids)
    position_ids = torch.from_numpy(positions).to(model.device)
    out = {
        "input_ids": torch.from_numpy(np.concatenate([sample.ids for sample in samples]))[None].to(model.device),
        "position_ids": position_ids[None] if position_ids.ndim == 1 else position_ids[:, None],
        "use_cache": False,
        "sample_lengths": tuple(len(sample.ids) for sample in samples),
    }
    if blocks:
        out["image_blocks"] = torch.from_numpy(np.concatenate(blocks)).to(model.device)
    return out | on_device(images.tensors, model.device, model.dtype)


def _probes(model: PreTrainedModel, vision: Vision) -> tuple[_Sample, ...]:
    """A sample with an image, one without, and one with two images."""
    draw = np.random.default_rng(1)
    tokenizer, most = vision.processor.tokenizer, vocabulary(model)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, vision.token_id}
    plain = np.array([one for one in range(min(most, 4096)) if one not in special])

    def sample(sizes: Sequence[tuple[int, int]]) -> _Sample:
        ids, images = [draw.choice(plain, WORDS)], []
        for width, height in sizes:
            image = pillow.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))
            images.append(vision.tensors(image))
            ids.append(np.array(tokenizer(vision.text_of(image), add_special_tokens=False)["input_ids"]))
            ids.append(draw.choice(plain, WORDS))
        return _Sample(np.concatenate(ids).astype(np.int64), ImageTensors.joined(images) if images else None)

    return sample(SIZES[:1]), sample(()), sample(SIZES[1:])


@contextmanager
def _watched(model: PreTrainedModel) -> Iterator[Rows]:
    """Record a random sum of each input row of every linear layer and convolution outside the language model."""
    found: Rows = {}
    with ExitStack() as hooks:
        for path in sorted(beside_decoder(model)):
            module = model.get_submodule(path)
            convolution = isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d)
            if not isinstance(module, torch.nn.Linear) and not convolution:
                continue

            def note(_: torch.nn.Module, inputs: Any, path: str = path, convolution: bool = convolution) -> None:
                x = widened(inputs[0].flatten(1) if convolution else inputs[0].flatten(0, -2))
                weights = torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
                found[path] = x @ weights.to(x)

            hooks.enter_context(module.register_forward_pre_hook(note))
        yield found
