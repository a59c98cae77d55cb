"""Convolutions of a vision tower, whose rows are those of several jobs' images: each job's are what PEFT makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import nn

from packlora.adapters.flat import SLOW
from packlora.adapters.kinds.convolution import RoutedRows
from packlora.adapters.kinds.convolution import Weights as ConvolutionWeights
from packlora.adapters.linear import Attached
from packlora.adapters.owners import TokenOwners
from packlora.adapters.reading import tensor_shapes
from packlora.adapters.spec import ModuleSpec, resolve
from packlora.adapters.weights import parameter_shapes
from packlora.base.weight_files import WeightFiles
from packlora.commands.adapter_folder import AdapterFolder
from packlora.errors import InputError
from packlora.export.export import _check_plain
from packlora.export.merged import Merged
from packlora.images.owners import ImageOwners, OwnedImage
from packlora.ops.dropout import dropout
from packlora.ops.dropout.keys import layer_salt

LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(5, 8, 3, padding="same"), (5, 7)),
    "2d": (lambda: nn.Conv2d(3, 7, (3, 2), stride=(2, 1), padding=(1, 0), bias=False), (3, 6, 5)),
    "2d in groups": (lambda: nn.Conv2d(6, 9, 2, groups=3), (6, 4, 5)),
    "3d": (lambda: nn.Conv3d(3, 6, (2, 3, 3), stride=(2, 3, 3)), (3, 2, 3, 6)),
}
SALT, RATE, SHARES = layer_salt("there"), 0.4, (2, 3, 1)
JOBS: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"use_dora": True}}


class Masked(nn.Module):
    """In the place of PEFT's dropout: the mask that a job draws for its rows."""

    def __init__(self, keys_R2: torch.Tensor) -> None:
        super().__init__()
        self.keys_R2 = keys_R2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x.flatten(1), self.keys_R2, SALT, RATE).view_as(x)


def own_weights(base: Any, use_dora: bool) -> ConvolutionWeights:
    """Of a job, in float64 and where training might have brought them."""
    spec = ModuleSpec(3, 1.7, RATE, use_dora, base.bias is not None, kind="convolution")
    room = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in parameter_shapes(spec, base).items()}
    return ConvolutionWeights(spec, base, 5, room)


@pytest.mark.parametrize("drops", [False, True], ids=["", "dropped"])
@pytest.mark.parametrize("kind", LAYERS)
def test_rows_of_jobs_beside_each_other_are_those_of_peft(kind: str, drops: bool) -> None:
    """Values and gradients; the last image is of nobody, the second job's rows lie in the middle."""
    torch.manual_seed(0)
    make, size = LAYERS[kind]
    base = make().double().requires_grad_(False)
    attached = Attached([])
    layer = RoutedRows(base, attached, SALT)
    for number, job in enumerate(JOBS.values()):
        own = layer.adapters[number] = own_weights(base, job.get("use_dora", False))
        with torch.no_grad():
            for parameter, value in layer.first_values(number):
                parameter.copy_(value)
            for parameter in own.parameters.values():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    images = [
        OwnedImage(owner, share, (owner + 3, 2, 1) if drops and owner >= 0 else None)
        for owner, share in zip((0, 1, -1), SHARES, strict=True)
    ]
    owners = ImageOwners(images, torch.device("cpu"))
    x = torch.randn(sum(SHARES) * 2, *size, dtype=torch.float64)
    with attached.active(TokenOwners(16, ((0, 0, 8), (1, 8, 16)), beside=owners)):
        y = layer(x.requires_grad_())
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    keys, stop = owners.of(len(x)).keys_T2, 0
    assert (keys is not None) == drops and x.grad is not None
    assert torch.equal(y[10:], base(x[10:]))
    for number, (name, job) in enumerate(JOBS.items()):
        start, stop = stop, stop + 2 * SHARES[number]
        own, given = layer.adapters[number], x.detach()[start:stop].clone().requires_grad_()
        bias: Any = "none" if own.bias is None else "lora_only"
        config = LoraConfig(r=3, lora_alpha=3 * 1.7, target_modules=["0"], lora_dropout=RATE, bias=bias, **job)
        torch.set_default_dtype(torch.float64)
        try:
            peft: Any = get_peft_model(nn.Sequential(make().double()), config)
        finally:
            torch.set_default_dtype(torch.float32)
        theirs = peft.base_model.model[0]
        theirs.base_layer.load_state_dict(base.state_dict())
        found = {"A": theirs.lora_A["default"].weight, "B": theirs.lora_B["default"].weight}
        found |= {"bias": theirs.base_layer.bias} if own.bias is not None else {}
        found |= {"filter_magnitude": theirs.lora_magnitude_vector["default"].weight} if job else {}
        assert {key: p.shape for key, p in found.items()} == {key: p.shape for key, p in own.parameters.items()}, name
        for key, parameter in found.items():
            parameter.data = own.parameters[key].detach().clone()
        theirs.lora_dropout["default"] = Masked(keys[start:stop]) if keys is not None else nn.Identity()
        out = peft(given)
        assert torch.allclose(y[start:stop], out, rtol=0, atol=1e-10), name
        (out * weights[start:stop]).sum().backward()
        assert given.grad is not None and torch.allclose(x.grad[start:stop], given.grad, rtol=0, atol=1e-10), name
        for key, parameter in found.items():
            error = (own.parameters[key].grad - parameter.grad).abs().max()
            assert float(error) < 1e-10 and float(parameter.grad.abs().max()) > 0, (name, key)


def test_factors_begin_as_peft_draws_them_and_learn_at_its_rates() -> None:
    """Within PEFT's bounds and up to them; the magnitude with the norms of W + s B A. Under LoRA+ it is slow."""
    base = nn.Conv2d(60, 40, 3, groups=20).double()
    spec = ModuleSpec(40, 0.5, 0.0, True, False, kind="convolution", start=False)
    attached = Attached([])
    room = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in parameter_shapes(spec, base).items()}
    own = ConvolutionWeights(spec, base, 5, room)
    for name, fan_in in (("A", 60 * 9), ("B", 2)):
        largest = float(own.parameters[name].abs().max())
        assert 0.9 < largest * fan_in**0.5 <= 1.0, name
    ((_, magnitude),) = own.first_values(base, attached)
    theirs = get_peft_model(nn.Sequential(base), LoraConfig(r=40, lora_alpha=20, target_modules=["0"], use_dora=True))
    layer: Any = theirs.base_model.model[0]
    layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = room["A"], room["B"]
    dora = layer.lora_magnitude_vector["default"]
    dora.update_layer(base_layer=base, lora_A=room["A"], lora_B=room["B"], scaling=0.5)
    assert torch.allclose(magnitude, dora.weight, rtol=0, atol=1e-12)
    optimizer = create_loraplus_optimizer(theirs, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=9.0)
    slow = {id(p) for group in optimizer.param_groups if group["lr"] == 1.0 for p in group["params"]}
    learnt = {"A": layer.lora_A["default"].weight, "B": layer.lora_B["default"].weight, "filter_magnitude": dora.weight}
    assert {name: id(p) in slow for name, p in learnt.items()} == {
        name: f"/{name}".endswith(SLOW) for name in own.parameters
    }
    zeros = own_weights(nn.Conv1d(3, 4, 2).double(), False)
    assert float(zeros.B.abs().max()) == 0.0 < float(zeros.A.abs().max())


def model_of(name: str, **settings: Any) -> Any:
    """A model without weights; of Qwen2.5-VL with other patch embeddings."""
    config = getattr(transformers, f"{name}Config")(**settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config) if name == "Lfm2" else None
        return model or transformers.AutoModelForImageTextToText.from_config(config)


def test_what_cannot_be_trained_is_refused_by_name() -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = model_of("Lfm2", **small, num_hidden_layers=2, layer_types=["conv", "full_attention"], vocab_size=50)
    said = r"matches model\.layers\.0\.conv\.conv, a Conv1d over tokens, in which packed samples would see each other"
    with pytest.raises(InputError, match=said):
        resolve(LoraConfig(target_modules=[r"conv.conv"]), model, "a job")
    small = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 50,
    }
    model = model_of("Qwen2_5_VL", text_config=text, vision_config=small)
    embed = model.model.visual.patch_embed
    for changes, reason in (
        ({"padding_mode": "circular"}, "pads with circular, an adapter with zeros"),
        ({"dilation": (1, 1, 2)}, r"has dilation \(1, 1, 2\), an adapter has none"),
        ({"groups": 3}, "has 3 groups, by which its rank 4 does not divide"),
    ):
        embed.proj = nn.Conv3d(3, 6, 2, **changes, device="meta")
        with pytest.raises(
            InputError, match=rf"matches model\.visual\.patch_embed\.proj, a convolution which {reason}"
        ):
            resolve(LoraConfig(r=4, target_modules=["patch_embed.proj"]), model, "a job")
    config = LoraConfig(r=6, target_modules=["patch_embed.proj"])
    spec = resolve(config, model, "a job")
    assert tensor_shapes(spec, model)["base_model.model.model.visual.patch_embed.proj.lora_B.weight"] == (6, 2, 1, 1, 1)
    merged = Merged(WeightFiles.__new__(WeightFiles), spec, {}, torch.float32, Path("folder"))
    with pytest.raises(InputError, match="proj, a convolution of 3 groups: no one weight has its numbers"):
        merged.find({}, model)
    opened = AdapterFolder(Path("folder"), config, "base", model, model.config, spec, {}, None)
    with pytest.raises(
        InputError,
        match=r"a convolution, which vLLM does not read; nor can it be merged: it adapts .*proj, .* 3 groups",
    ):
        _check_plain(opened, "vLLM")
