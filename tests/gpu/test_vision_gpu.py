"""Convolutions of vision towers in bfloat16 on a GPU: a layer beside PEFT's, and a run with images.

make gpu
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import assert_as_exact
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from seeds import SEED
from torch import nn
from vision_models import image_row, vision_folder, write_images

import packlora
from packlora.adapters.kinds.convolution import RoutedRows
from packlora.adapters.kinds.convolution import Weights as ConvolutionWeights
from packlora.adapters.linear import Attached
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import ModuleSpec
from packlora.adapters.weights import parameter_shapes
from packlora.images.owners import ImageOwners, OwnedImage

DEVICE = "cuda"
LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(40, 48, 3, padding="same"), (40, 17)),
    "2d": (lambda: nn.Conv2d(24, 56, (3, 2), stride=(2, 1), padding=(1, 0), bias=False), (24, 14, 9)),
    "2d in groups": (lambda: nn.Conv2d(24, 48, 2, groups=3), (24, 9, 7)),
    "3d": (lambda: nn.Conv3d(3, 64, (2, 14, 14), stride=(2, 14, 14), bias=False), (3, 2, 28, 28)),
}
SCALE = 1.5


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_convolutions_of_a_job_are_as_exact_as_peft_s_in_bfloat16(kind: str, dora: bool) -> None:
    """Values and gradients of a job's rows; those of nobody have the bits of the frozen layer."""
    make, size = LAYERS[kind]

    def drawn(number: int) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        torch.manual_seed(SEED + number)
        base = make().requires_grad_(False).to(DEVICE, torch.bfloat16)
        spec = ModuleSpec(6, SCALE, 0.0, dora, False, kind="convolution", start=True)
        shapes = parameter_shapes(spec, base)
        values = {name: torch.randn(shape, device=DEVICE).bfloat16().float() * 0.25 for name, shape in shapes.items()}
        if dora:
            values["filter_magnitude"] = values["filter_magnitude"].abs() + 0.5
        x = torch.randn(9, *size, device=DEVICE).bfloat16()
        return base, values, x, torch.randn_like(base(x))

    def own(number: int) -> dict[str, torch.Tensor]:
        base, values, x, dy = drawn(number)
        spec, attached = ModuleSpec(6, SCALE, 0.0, dora, False, kind="convolution", start=True), Attached([])
        layer = RoutedRows(base, attached, 1)
        job = layer.adapters[0] = ConvolutionWeights(spec, base, 5, {name: v.clone() for name, v in values.items()})
        layer.first_values(0)
        with torch.no_grad():
            for name, parameter in job.parameters.items():
                parameter.copy_(values[name])
        owners = TokenOwners(
            9, ((0, 0, 9),), beside=ImageOwners([OwnedImage(0, 7), OwnedImage(-1, 2)], torch.device(DEVICE))
        )
        with attached.active(owners):
            y = layer(x.requires_grad_())
        assert y.dtype == torch.bfloat16 and torch.equal(y[7:], base(x)[7:])
        grads = torch.autograd.grad((y[:7] * dy[:7]).sum(), [x, *job.parameters.values()])
        return dict(zip(["y", "x", *job.parameters], [y[:7].detach(), grads[0][:7], *grads[1:]], strict=True))

    def peft(number: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        base, values, x, dy = drawn(number)
        config = LoraConfig(r=6, lora_alpha=6 * SCALE, target_modules=["0"], use_dora=dora)
        model: Any = get_peft_model(nn.Sequential(base), config).to(dtype)
        layer, x = model.base_model.model[0], x[:7].to(dtype).requires_grad_()
        found = {"A": layer.lora_A["default"].weight, "B": layer.lora_B["default"].weight}
        found |= {"filter_magnitude": layer.lora_magnitude_vector["default"].weight} if dora else {}
        for name, parameter in found.items():
            parameter.data = values[name].view_as(parameter).to(dtype)
        y = model(x)
        grads = torch.autograd.grad((y * dy[:7].to(dtype)).sum(), [x, *found.values()])
        return {name: own.view(-1) for name, own in zip(["y", "x", *found], [y.detach(), *grads], strict=True)}

    def draw(number: int) -> tuple[dict[str, torch.Tensor], ...]:
        ours = {name: tensor.reshape(-1) for name, tensor in own(number).items()}
        return ours, peft(number, torch.bfloat16), peft(number, torch.float64)

    assert_as_exact(draw, 3, SEED)


def test_a_run_with_images_trains_its_convolution_as_in_float64(tokenizer: Any, tmp_path: Path) -> None:
    """LoRA and DoRA on all layers of both parts, in a microbatch, beside a run in float64 of the same numbers."""
    base = vision_folder("qwen2_5_vl", tokenizer, tmp_path / "base")
    weights = Path(base) / "model.safetensors"
    save_file({name: own.bfloat16().float() for name, own in load_file(weights).items()}, weights, {"format": "pt"})
    names = write_images(tmp_path, [(24, 16), (32, 24), (20, 40)], SEED)
    rows = [image_row([name], "what is it", "the quick brown fox") for name in names]
    rows.append(image_row([], "and now", "jumps over the dog"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    adapter = {"r": 4, "target_modules": r".*(_proj|proj|qkv)"}
    data = {"path": str(tmp_path / "rows.jsonl"), "eval_path": str(tmp_path / "rows.jsonl")}
    train = {"global_batch_size": 2, "max_steps": 4, "learning_rate": 5e-3, "shuffle": False}
    jobs = [
        {"name": name, "data": data, "adapter": {**adapter, "use_dora": name == "dora"}, "train": train}
        for name in ("lora", "dora")
    ]
    found = {}
    for dtype, device in (("bfloat16", DEVICE), ("float64", "cpu")):
        out = tmp_path / dtype
        tree = {"base_model": base, "output_dir": str(out), "dtype": dtype, "device": device, "jobs": jobs}
        packlora.train({**tree, "max_tokens_per_microbatch": 400})
        losses = [json.loads(line) for line in (out / "metrics.jsonl").open()]
        adapters = {name: load_file(out / name / "adapter_model.safetensors") for name in ("lora", "dora")}
        found[dtype] = [line["loss"] for line in losses], adapters
    assert found["bfloat16"][0] == pytest.approx(found["float64"][0], rel=2e-2)
    for name, exact in found["float64"][1].items():
        key = next(key for key in exact if "patch_embed" in key and "lora_B" in key)
        own = found["bfloat16"][1][name][key].double().flatten()
        assert float(torch.cosine_similarity(own, exact[key].double().flatten(), 0)) > 0.9, name
