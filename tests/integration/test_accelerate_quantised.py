"""packlora.accelerate on PEFT models over bitsandbytes' layers of four and eight bits."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from quantised import KINDS, dequantise, load_quantised
from seeds import SEED
from test_accelerate import IDS, assert_same, fill, outcome

import packlora
from packlora.codes.weight import Quantized


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved model with biases; PEFT's own numbers are right on a CPU where widths are multiples of 64."""
    path = tmp_path_factory.mktemp("base")
    tiny_model("qwen2", num_hidden_layers=1, intermediate_size=128).save_pretrained(path)
    return str(path)


def adapted(base: Any, **changes: Any) -> Any:
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fill(get_peft_model(base, LoraConfig(**settings))).train()


def in_float64(folder: str, kind: str) -> Any:
    """All of it but the codes, which are multiplied in float64."""
    base = load_quantised(folder, kind)
    for module in base.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                module._parameters[name] = torch.nn.Parameter(parameter.double(), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.double()
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.float64
    return base


CHANGES: dict[str, dict[str, Any]] = {
    "nf4": {},
    "nf4 double": {"use_dora": True},
    "fp4": {"use_rslora": True, "rank_pattern": {"v_proj": 3}},
    "int8": {"use_dora": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_peft_on_the_dequantised_weights_in_float64(kind: str, folder: str) -> None:
    base = in_float64(folder, kind)
    plain = adapted(dequantise(copy.deepcopy(load_quantised(folder, kind)), torch.float64), **CHANGES[kind]).double()
    want = outcome(fill(plain))
    model = adapted(base, **CHANGES[kind])
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.double()
    fill(model)
    report = packlora.accelerate(model)
    assert report.accelerated == len(report.modules) and len(report.groups) == 2
    assert_same(outcome(model), want, 1e-12)
    assert not any(own.left for own in report.served().values())


@pytest.mark.parametrize("kind", ["nf4 double", "int8"])
@pytest.mark.parametrize("dora", [False, True])
def test_masks_of_dropout_are_those_of_a_dense_model(kind: str, dora: bool, folder: str) -> None:
    """Which of them are right is known of dense models."""
    changes = {"lora_dropout": 0.3, "use_dora": dora}
    model, plain = (
        adapted(base, **changes)
        for base in (load_quantised(folder, kind), dequantise(load_quantised(folder, kind), torch.float32))
    )
    found = []
    for each in (model, plain):
        packlora.accelerate(fill(each))
        torch.manual_seed(SEED)
        found.append(outcome(each))
    assert_same(*found, 2e-5)  # type: ignore[arg-type]


def test_codes_of_four_bits_in_tensors_of_floats_are_read_and_codes_that_were_cast_are_not(folder: str) -> None:
    """bnb_4bit_quant_storage. A cast of the PEFT model writes other bytes into such codes, for bitsandbytes as well."""
    found = []
    for storage in ("uint8", "bfloat16"):
        model = adapted(load_quantised(folder, "nf4 double", storage=storage))
        packlora.accelerate(model)
        found.append(outcome(model))
    assert_same(found[1], found[0], 0.0)
    packlora.restore(model)
    for parameter in model.parameters():  # as model.half() of those that have no gradient
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.half()
    reasons = {module.reason for module in packlora.accelerate(model).modules}
    assert reasons == {
        "the codes of its base layer were cast from bfloat16 to float16 and are lost; load the model again"
    }


@pytest.mark.parametrize("kind", ["nf4 double", "int8"])
def test_a_model_prepared_for_training_in_bfloat16_is_as_exact_as_peft_s(
    kind: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, embeddings and adapters in float32, the quantised layers in bfloat16, activations recomputed."""
    dtypes, values = set(), Quantized._values
    monkeypatch.setattr(Quantized, "_values", lambda weight: dtypes.add(weight.dtype) or values(weight))
    base = prepare_model_for_kbit_training(
        load_quantised(folder, kind, torch.bfloat16), gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    model = adapted(base)
    exact = outcome(fill(adapted(dequantise(load_quantised(folder, kind, torch.bfloat16), torch.float64)).double()))
    peft = outcome(model)
    report = packlora.accelerate(model)
    got = outcome(model)
    assert report.accelerated == len(report.modules) and not any(own.left for own in report.served().values())
    assert got.keys() == peft.keys() and all(got[name].dtype == peft[name].dtype for name in got)

    def error(found: dict[str, torch.Tensor]) -> float:
        return sum(float((found[n].double() - exact[n]).norm() / exact[n].norm()) ** 2 for n in exact) ** 0.5

    assert error(got) <= 2 * error(peft)
    assert dtypes == ({torch.float32} if kind == "int8" else {torch.bfloat16})


def test_other_codes_are_seen_and_what_cannot_be_read_is_left_to_peft(folder: str) -> None:
    model = adapted(load_quantised(folder, "nf4"), use_dora=True)
    report = packlora.accelerate(model)
    model(input_ids=IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.merge_adapter()
        model.unmerge_adapter()
    got = outcome(model)
    packlora.restore(model)
    assert_same(got, outcome(model), 2e-5)
    attention = model.base_model.model.model.layers[0].self_attn
    attention.q_proj.base_layer.weight.quant_state.packing_format_for_cpu = True
    attention.k_proj.base_layer.register_forward_hook(lambda *_: None)
    report = packlora.accelerate(adapted(model.unload(), target_modules=["q_proj", "k_proj", "v_proj"]), example={})
    reasons = {module.path.rpartition(".")[2]: str(module.reason) for module in report.modules if module.reason}
    assert "packed its base layer for inference on a CPU" in reasons.pop("q_proj")
    assert "its base layer has hooks" in reasons.pop("k_proj") and not reasons


def test_finding_siblings_changes_no_layer(folder: str) -> None:
    """bitsandbytes packs layers anew where they run without gradients on some CPUs, and takes the first input's dtype."""
    base = load_quantised(folder, "nf4")
    for module in base.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype, module.compute_type_is_set = None, False
            module.support_avx512bf16_for_cpu = True
    model = adapted(base)
    packlora.accelerate(model)
    layers = [module for module in base.modules() if hasattr(module, "compute_dtype")]
    assert len(layers) == 7
    for layer in layers:
        assert layer.compute_dtype is None and not layer.compute_type_is_set and layer.support_avx512bf16_for_cpu
        assert not getattr(layer.weight.quant_state, "packing_format_for_cpu", False)
