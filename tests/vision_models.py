"""Tiny random vision-language models of several families, in folders with a processor and a tokenizer; rows with images."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import PreTrainedTokenizerFast

TEXT: dict[str, Any] = {
    "vocab_size": 340, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
EXTRA = [
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>", "<start_of_image>", "<end_of_image>",
    "<image_soft_token>",
]  # fmt: skip
CHAT = (
    "{{% for m in messages %}}<|im_start|>{{{{ m['role'] }}}}\n"
    "{{% if m['content'] is string %}}{{{{ m['content'] }}}}{{% else %}}{{% for c in m['content'] %}}"
    "{{% if c['type'] == 'image' %}}{image}{{% else %}}{{{{ c['text'] }}}}{{% endif %}}{{% endfor %}}{{% endif %}}"
    "<|im_end|>\n{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
SHOWN = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "llava": "<image>\n",
}
SHOWN |= {"qwen3_vl": SHOWN["qwen2_5_vl"], "llava_next": SHOWN["llava"]}
CLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "projection_dim": 16,
}  # fmt: skip


def _tokenizer(plain: PreTrainedTokenizerFast, family: str, folder: Path) -> Any:
    """The tests' tokenizer with the family's special tokens, as its real tokenizers have them."""
    plain.save_pretrained(folder)
    named: dict[str, str] = {}
    if family == "gemma3":
        named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    elif family.startswith("llava"):
        named = {"image_token": "<image>"}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=named)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *EXTRA]})
    tokenizer.chat_template = CHAT.format(image=SHOWN[family])
    tokenizer.save_pretrained(folder)
    return tokenizer


def _parts(family: str, ids: Callable[[str], int]) -> tuple[Any, Any, dict[str, Any]]:
    """Configuration, image processor, and more of the processor's settings."""
    qwen = {
        "image_token_id": ids("<|image_pad|>"), "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"), "vision_end_token_id": ids("<|vision_end|>"),
    }  # fmt: skip
    sizes = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}}
    if family == "qwen2_5_vl":
        vision = {
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
            "window_size": 16, "fullatt_block_indexes": [1], "spatial_patch_size": 4,
        }  # fmt: skip
        config = transformers.Qwen2_5_VLConfig(
            text_config=TEXT | {"rope_parameters": ROPE}, vision_config=vision, **qwen
        )
        return config, transformers.Qwen2VLImageProcessorPil(**sizes), {}
    if family == "qwen3_vl":
        vision = {
            "depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
        }  # fmt: skip
        rope = {**ROPE, "mrope_interleaved": True}
        config = transformers.Qwen3VLConfig(
            text_config=TEXT | {"rope_parameters": rope, "head_dim": 8}, vision_config=vision, **qwen
        )
        return config, transformers.Qwen2VLImageProcessorPil(**sizes, image_mean=[0.5] * 3, image_std=[0.5] * 3), {}
    if family == "gemma3":
        vision = {key: value for key, value in CLIP.items() if key != "projection_dim"} | {"vision_use_head": False}
        config = transformers.Gemma3Config(
            text_config=TEXT | {"head_dim": 8, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
            vision_config=vision, mm_tokens_per_image=4, image_token_index=ids("<image_soft_token>"),
            boi_token_index=ids("<start_of_image>"), eoi_token_index=ids("<end_of_image>"),
        )  # fmt: skip
        return config, transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16}), {"image_seq_length": 4}
    text = transformers.LlamaConfig(**TEXT)
    more = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    own = {
        "text_config": text,
        "vision_config": transformers.CLIPVisionConfig(**CLIP),
        "image_token_id": ids("<image>"),
    }
    if family == "llava":
        size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
        return transformers.LlavaConfig(**own, image_seq_length=16), transformers.CLIPImageProcessorPil(**size), more
    grid = [[16, 32], [32, 16], [32, 32]]
    size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}, "image_grid_pinpoints": grid}
    config = transformers.LlavaNextConfig(**own, image_grid_pinpoints=grid)
    return config, transformers.LlavaNextImageProcessorPil(**size), more


def vision_folder(family: str, plain: PreTrainedTokenizerFast, folder: Path) -> str:
    """Save a tiny model, in which every weight matters, and what makes its inputs."""
    tokenizer = _tokenizer(plain, family, folder)
    config, images, more = _parts(family, tokenizer.convert_tokens_to_ids)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.2 if parameter.ndim > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    model.save_pretrained(folder)
    images.save_pretrained(folder)
    if more:
        (folder / "processor_config.json").write_text(json.dumps(more))
    return str(folder)


def write_images(folder: Path, sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[str]:
    """Random pictures of these widths and heights; their names."""
    draw = np.random.default_rng(seed)
    names = []
    for number, (width, height) in enumerate(sizes):
        name = f"{seed}-{number}.png"
        Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / name)
        names.append(name)
    return names


def image_row(names: Sequence[str], question: str, answer: str) -> dict[str, Any]:
    blocks: list[dict[str, str]] = [{"type": "image", "path": name} for name in names]
    content = [*blocks, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}
