"""Vision-language models: rows with images, packed beside texts and other jobs' rows, train as they do alone and as in PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from vision_models import image_row, vision_folder, write_images

import packlora
from packlora.base.load import read_config
from packlora.base.vision import Vision
from packlora.config import Run
from packlora.runtime.prepare import prepare

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "llava_next"]
KINDS: dict[str, dict[str, Any]] = {"lora": {"use_dora": False}, "dora": {"use_dora": True}}
SIZES = [(24, 16), (16, 16), (32, 24), (20, 40), (40, 20)]
"""Widths and heights: odd numbers of patches, and both ways round."""


@pytest.fixture(scope="session")
def vision_base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def make(family: str) -> str:
        if family not in made:
            made[family] = vision_folder(family, tokenizer, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By job its data: rows with one image, with two, and without."""
    out = {}
    for seed, name in enumerate(KINDS):
        folder = tmp_path_factory.mktemp(name)
        names = write_images(folder, SIZES, seed)
        some = [
            image_row(names[:1], "what is it", "the quick brown fox"),
            image_row([], "and now", "jumps over the dog"),
            image_row(names[1:3], "both of them", "lazy"),
            image_row(names[3:4], "this", "and then some more of the same"),
            image_row(names[4:5], "the last one", "fox"),
        ]
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in some))
        out[name] = str(path)
    return out


def plain_model(base: str) -> Any:
    return AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float64, attn_implementation="sdpa")


def peft_model(base: str, kind: dict[str, Any]) -> Any:
    """PEFT's model of random adapters on everything that all-linear means, in float64."""
    torch.manual_seed(0)
    loaded = plain_model(base)
    torch.set_default_dtype(torch.float64)
    try:
        peft = get_peft_model(loaded, LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", **kind))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
                assert parameter.dtype == torch.float64, name
    return peft.eval()


def own_inputs(base: str, data: str) -> list[dict[str, torch.Tensor]]:
    """Of each row what the library's own processor gives, with the labels of what the assistant says."""
    vision = Vision.of(base, None, read_config(base, None))
    tokenizer = vision.processor.tokenizer
    out = []
    for line in Path(data).read_text().splitlines():
        messages = json.loads(line)["messages"]
        answer = messages[1]["content"] + "<|im_end|>"
        blocks = [message | {"content": message["content"] if isinstance(message["content"], list) else [
            {"type": "text", "text": message["content"]}]} for message in messages]  # fmt: skip
        text = tokenizer.apply_chat_template(blocks, tokenize=False).rstrip("\n")
        images = [
            Image.open(Path(data).parent / block["path"]) for block in blocks[0]["content"] if block["type"] == "image"
        ]
        inputs = vision.processor(images=images or None, text=[text], return_tensors="pt", add_special_tokens=False)
        labels = inputs["input_ids"].clone()
        labels[:, : -len(tokenizer(answer)["input_ids"])] = -100
        out.append(dict(inputs) | {"labels": labels})
    return out


def tree(base: str, out: Path, rows: dict[str, str], starts: Path | None, **changes: Any) -> dict[str, Any]:
    train = {"global_batch_size": 3, "max_steps": 3, "learning_rate": 5e-3, "max_grad_norm": 0.5}
    jobs = [
        {
            "name": name,
            "data": {"path": rows[name], "eval_path": rows[name]},
            "train": train,
            "adapter": {"r": 3, "lora_alpha": 5, **kind, "lora_dropout": 0.25}
            if starts is None
            else {"init_from": str(starts / name), "lora_dropout": 0.0},
        }
        for name, kind in KINDS.items()
    ]
    return {
        "base_model": base, "output_dir": str(out), "max_tokens_per_microbatch": 400, "save_every": 1, "device": "cpu",
        "dtype": "float64", "jobs": jobs,
    } | changes  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_on_images_are_those_of_peft_and_adamw(
    family: str, vision_base: Any, rows: dict[str, str], tmp_path: Path
) -> None:
    """Two jobs in one microbatch, on all linear layers of the vision tower and the language model."""
    base = vision_base(family)
    models = {name: peft_model(base, kind) for name, kind in KINDS.items()}
    for name, peft in models.items():
        peft.save_pretrained(tmp_path / name)
    run = Run.model_validate(tree(base, tmp_path / "out", rows, tmp_path))
    order = {job.config.name: job.data for job in prepare(run).jobs}
    result = packlora.train(run)
    assert result.status == "done"
    for name, peft in models.items():
        inputs = own_inputs(base, rows[name])
        parameters = [parameter for parameter in peft.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.0)
        held_out = evaluated(peft, inputs)
        losses = []
        for step in range(3):
            batch = [inputs[number] for number in order[name].global_batch(step)]
            count = sum(int((one["labels"][:, 1:] != -100).sum()) for one in batch)
            loss = sum(summed(peft, one) for one in batch) / count
            loss.backward()
            losses.append(float(loss))
            torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], 0.5)
            optimizer.step()
            optimizer.zero_grad()
        lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
        mine = [line["loss"] for line in lines if line.get("job") == name and "loss" in line]
        assert mine == pytest.approx(losses, abs=1e-10)
        theirs, got = (
            get_peft_model_state_dict(peft),
            load_file(tmp_path / "out" / name / "adapter_model.safetensors"),
        )
        assert len(theirs) == len(got)
        for key, value in theirs.items():
            own = got[key] if key in got else got[key + ".weight"]
            assert float((own - value).abs().max()) < 1e-10, key
        assert any("language_model" not in key and "_B" in key for key in got)
        done = result.jobs[name]
        assert (done.eval_before, done.eval_after) == pytest.approx((held_out, evaluated(peft, inputs)), abs=1e-10)
        read = PeftModel.from_pretrained(plain_model(base), str(tmp_path / "out" / name)).eval()
        with torch.no_grad():
            assert torch.allclose(logits(read, inputs[2]), logits(peft, inputs[2]), rtol=0, atol=1e-10)


def summed(peft: Any, one: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the losses of a row's label tokens."""
    return torch.nn.functional.cross_entropy(logits(peft, one)[:-1], one["labels"][0, 1:], reduction="sum")


def logits(peft: Any, one: dict[str, torch.Tensor]) -> torch.Tensor:
    own = {name: tensor for name, tensor in one.items() if name not in ("labels", "attention_mask")}
    own = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in own.items()}
    found: torch.Tensor = peft(**own, use_cache=False).logits[0]
    return found


def evaluated(peft: Any, inputs: list[dict[str, torch.Tensor]]) -> float:
    with torch.no_grad():
        count = sum(int((one["labels"][:, 1:] != -100).sum()) for one in inputs)
        return float(sum(summed(peft, one) for one in inputs)) / count
