"""packlora.accelerate on PEFT models over layers of torchao, GPTQ and AWQ, and what is left to PEFT."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import tiny_model
from peft import LoraConfig, get_peft_model
from seeds import SEED
from stored_codes import FORMATS, save_dense, save_stored
from test_accelerate import assert_same, outcome

import packlora
from packlora.codes.library import library_codes
from packlora.codes.weight import Quantized

CHANGES: dict[str, dict[str, Any]] = {
    "Int8WeightOnlyConfig": {"use_dora": True, "rank_pattern": {"v_proj": 3}},
    "Float8WeightOnlyConfig": {"use_rslora": True},
    "gptq": {"rank_pattern": {"v_proj": 3}},
    "awq": {},
}
"""By kind; PEFT has no DoRA over the last two."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    tiny_model("qwen2", num_hidden_layers=1, intermediate_size=128).save_pretrained(folder)
    return folder


def loaded(kind: str, source: Path, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Path]:
    """The model in codes, and a folder with the dense weights that they stand for."""
    own: dict[str, Any] = {"dtype": dtype, "device_map": {"": "cpu"}, "attn_implementation": "eager"}
    dense = {}
    if kind in FORMATS:
        pytest.importorskip("gptqmodel")
        backends = {"gptq": ("GPTQConfig", "gptq_torch"), "awq": ("AwqConfig", "torch_awq")}
        config, backend = backends[kind]
        own["quantization_config"] = getattr(transformers, config)(bits=4, backend=backend)
        dense = save_stored(kind, source, folder / "codes")
        source_of = folder / "codes"
    else:
        torchao: Any = pytest.importorskip("torchao.quantization")
        own["quantization_config"] = transformers.TorchAoConfig(getattr(torchao, kind)())
        source_of = source
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(source_of, **own)
    for path, module in model.named_modules():
        module.__dict__.pop("dequantize_weight", None)  # GPTQModel's, compiled, which takes minutes
        if kind not in FORMATS and type(module) is torch.nn.Linear and type(module.weight) is not torch.nn.Parameter:
            dense[path] = module.weight.dequantize().float()
    save_dense(source, folder / "dense", dense)
    return model.train(), folder / "dense"


def fill(model: Any) -> Any:
    """Adapters that matter, by name: GPTQ's layers come in another order."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, tensor in sorted(model.named_parameters()):
            if "lora_" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model


def adapted(base: Any, **changes: Any) -> Any:
    settings = {"r": 4, "lora_alpha": 6, "target_modules": r".*_proj", "task_type": "CAUSAL_LM", **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fill(get_peft_model(base, LoraConfig(**settings))).train()


def plain(folder: Path, model: Any, dtype: torch.dtype) -> Any:
    """The dense model, with the biases of the one in codes."""
    dense = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    for path, module in model.named_modules():
        if path.endswith("_proj") and module.bias is not None:
            dense.get_submodule(path).bias.data = module.bias.detach().to(dtype)
    return dense.train()


@pytest.mark.parametrize("kind", CHANGES)
def test_numbers_are_as_exact_as_peft_s_over_the_same_codes(kind: str, source: Path, tmp_path: Path) -> None:
    """In float32, against the dense model in float64."""
    base, dense = loaded(kind, source, tmp_path)
    exact = outcome(fill(adapted(plain(dense, base, torch.float64), **CHANGES[kind]).double()))
    model = adapted(base, **CHANGES[kind])
    peft = outcome(model)
    report = packlora.accelerate(model)
    got = outcome(model)
    assert report.accelerated == len(report.modules) == 7 and len(report.groups) == 2
    assert not any(own.left for own in report.served().values())

    def error(found: dict[str, torch.Tensor]) -> float:
        return sum(float((found[n].double() - exact[n]).norm() / exact[n].norm()) ** 2 for n in exact) ** 0.5

    assert got.keys() == peft.keys() == exact.keys()
    assert error(got) <= 2 * error(peft) + 1e-6
    assert error(got) < (0.02 if kind == "awq" else 1e-4)  # AWQ's layers multiply in 16 bits
    packlora.restore(model)
    assert_same(outcome(model), peft, 0.0)


def test_codes_that_change_are_seen_and_no_dense_copy_is_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, _ = loaded("Int8WeightOnlyConfig", source, tmp_path)
    model = adapted(base, use_dora=True)
    report = packlora.accelerate(model)
    outcome(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.merge_adapter()
        model.unmerge_adapter()
    made, values = [], Quantized._values
    monkeypatch.setattr(Quantized, "_values", lambda weight: made.append(values(weight)) or made[-1])
    got = outcome(model)
    assert made and not any(own.left for own in report.served().values())
    packlora.restore(model)
    assert_same(got, outcome(model), 2e-5)


def test_layers_that_quantise_their_inputs_or_are_watched_are_left_to_peft(source: Path, tmp_path: Path) -> None:
    torchao: Any = pytest.importorskip("torchao.quantization")
    base, _ = loaded("Int8WeightOnlyConfig", source, tmp_path)
    attention = base.model.layers[0].self_attn
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watched = copy.deepcopy(attention.k_proj.weight)
        torchao.quantize_(base.lm_head, torchao.Int8DynamicActivationInt8WeightConfig())
        attention.v_proj.weight = torch.nn.Parameter(watched.dequantize(), requires_grad=False)
        torchao.quantize_(attention.v_proj, torchao.Int8DynamicActivationInt8WeightConfig())
    codes = library_codes(attention.v_proj)
    assert codes is not None and codes.quantises_inputs
    attention.k_proj.register_forward_hook(lambda *_: None)
    report = packlora.accelerate(adapted(base, target_modules=["q_proj", "k_proj", "v_proj"]), example={})
    reasons = {module.path.rpartition(".")[2]: str(module.reason) for module in report.modules if module.reason}
    assert "which quantises its inputs too" in reasons.pop("v_proj")
    assert "its base layer has hooks" in reasons.pop("k_proj") and not reasons
