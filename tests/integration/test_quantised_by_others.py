"""Runs on base models in the codes of torchao, GPTQ, AWQ, compressed-tensors and FP8: the numbers of dense weights that say the
same, and PEFT's; what is refused before training."""

from __future__ import annotations

import gc
import importlib.util
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from peft import PeftModel
from safetensors.torch import load_file, save_file
from stored_codes import FORMATS, NEEDS, save_dense, save_stored, write_config
from test_training import JOBS, adapter, config, distance, like_peft, perturbed_peft, steps, train, train_by_peft
from transformers import AutoModelForCausalLM, TorchAoConfig

from packlora.base.model import Base, load_base
from packlora.codes import dense_files
from packlora.codes.load import read_in_codes
from packlora.codes.weight import QuantizedLinear
from packlora.config import QuantizationConfig, Run
from packlora.errors import InputError
from packlora.export.merge import merge_adapter
from packlora.runtime.estimate import memory_parts
from packlora.runtime.prepare import prepare

Rows = Callable[..., str]
TORCHAO = {
    "int8_weight_only": {"method": "torchao", "quant_type": "int8_weight_only"},
    "float8_weight_only": {"method": "torchao", "quant_type": "float8_weight_only"},
}
NIGHTLY = {"int8", "float8", "float8_weight_only"}
KINDS = [
    pytest.param(kind, marks=pytest.mark.soak) if kind in NIGHTLY else kind
    for kind in (*FORMATS, *TORCHAO)
]  # fmt: skip


def need(kind: str) -> None:
    for name in NEEDS.get(kind, ("torchao",)):
        pytest.importorskip(name)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("source") / "base"
    model = tiny_model("qwen2", hidden_size=64, intermediate_size=128, num_attention_heads=4)
    with torch.no_grad():  # GPTQModel keeps biases in 16 bits
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(parameter.half())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


Made = Callable[[str], tuple[Path, Path, Any]]


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """kind -> a base model in codes, one of the dense weights that they stand for, and `quantization` of a run."""
    known: dict[str, tuple[Path, Path, Any]] = {}

    def make(kind: str) -> tuple[Path, Path, Any]:
        need(kind)
        if kind not in known:
            folder = tmp_path_factory.mktemp("stored")
            stored = source
            if kind in TORCHAO:
                dense = by_torchao(source, kind)
            else:
                stored = folder / "codes"
                dense = save_stored(kind, source, stored)
            save_dense(source, folder / "dense", dense)
            known[kind] = stored, folder / "dense", TORCHAO.get(kind)
        return known[kind]

    return make


def by_torchao(source: Path, kind: str) -> dict[str, torch.Tensor]:
    """What the user of torchao gets of it."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    quantize_(model.model, {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}[kind.split("_")[0]]())
    return {
        path: module.weight.dequantize()
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and path != "lm_head"
    }


def loaded(tree: dict[str, Any]) -> tuple[Base, dict[str, QuantizedLinear], Any]:
    run = Run.model_validate(tree)
    prepared = prepare(run)
    base = load_base(run, prepared.tokenizer)
    layers = {path: own for path, own in base.model.named_modules() if isinstance(own, QuantizedLinear)}
    return base, layers, (run, prepared)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_that_on_dense_weights_which_say_the_same(
    kind: str, made: Made, write_rows: Rows, tmp_path: Path
) -> None:
    """Two jobs, LoRA and DoRA with dropout, with activations recomputed; in float64 to its last digits."""
    codes, dense, quantization = made(kind)
    jobs = [{**job, "train": {**job["train"], "max_steps": 2}} for job in JOBS[1::2]]
    tree = config(str(dense), tmp_path / "dense", write_rows, jobs, dtype="float64")
    train(tree)
    again = {**tree, "base_model": str(codes), "quantization": quantization, "output_dir": str(tmp_path / "codes")}
    train({**again, "gradient_checkpointing": True})
    for job in jobs:
        assert distance(adapter(tmp_path / "codes", job["name"]), adapter(tmp_path / "dense", job["name"])) < 1e-10


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_take_what_a_plan_predicts_and_no_dense_copy_is_kept(
    kind: str, dtype: str, made: Made, write_rows: Rows, tmp_path: Path
) -> None:
    codes, _, quantization = made(kind)
    tree = config(str(codes), tmp_path / "out", write_rows, JOBS[:1], quantization=quantization, dtype=dtype)
    gc.collect()
    before = {id(found) for found in gc.get_objects() if isinstance(found, torch.Tensor)}
    base, layers, (run, prepared) = loaded(tree)
    assert len(layers) == 14 and type(base.model.get_output_embeddings()) is torch.nn.Linear
    held = sum(tensor.nbytes for tensor in base.model.state_dict().values())
    predicted = memory_parts(run, prepared, 1)["frozen weights"]
    assert abs(predicted / held - 1) < 0.02
    ids = torch.arange(6)[None]
    base.model(input_ids=ids, position_ids=ids, sample_lengths=(6,), use_cache=False)
    gc.collect()
    left = [
        found for found in gc.get_objects()
        if isinstance(found, torch.Tensor) and id(found) not in before and found.is_floating_point() and not found.is_meta
        and found.dtype.itemsize > 1 and found.numel() >= 32 * 64
    ]  # fmt: skip
    vectors = {id(module.weight) for module in base.model.modules() if type(module) is torch.nn.Embedding}
    vectors.add(id(base.model.get_output_embeddings().weight))
    assert {id(found) for found in left} <= vectors


@pytest.mark.parametrize(
    ("kind", "picked", "changes", "number"),
    [
        ("fp8", r".*1.*_proj", {"modules_to_not_convert": ["lm_head", "model.layers.0"]}, 7),
        ("fp8", r".*(_proj|lm_head)", {"modules_to_not_convert": []}, 15),
        pytest.param(
            "packed int4",
            r".*(self_attn|gate|up).*",
            {"ignore": ["lm_head", "re:.*down_proj"]},
            12,
            marks=pytest.mark.soak,
        ),
        ("gptq", r".*[qk]_proj", {"modules_in_block_to_quantize": [["q_proj", "k_proj"]]}, 4),
        ("awq", r".*self_attn.*", {"modules_to_not_convert": ["gate_proj", "up_proj", "down_proj"]}, 8),
    ],
)
def test_layers_that_a_configuration_leaves_out_are_dense(
    kind: str, picked: str, changes: dict[str, Any], number: int, source: Path, write_rows: Rows, tmp_path: Path
) -> None:
    """Beside layers in codes, or the output layer in codes as well; in float64 as on dense weights."""
    need(kind)
    save_dense(source, tmp_path / "dense", save_stored(kind, source, tmp_path / "codes", picked, **changes))
    jobs = [{**JOBS[0], "train": {**JOBS[0]["train"], "max_steps": 1}}]
    tree = config(str(tmp_path / "dense"), tmp_path / "out", write_rows, jobs, dtype="float64")
    again = {**tree, "base_model": str(tmp_path / "codes"), "output_dir": str(tmp_path / "again")}
    base, layers, (run, prepared) = loaded(again)
    assert len(layers) == number
    held = sum(tensor.nbytes for tensor in base.model.state_dict().values())
    assert abs(memory_parts(run, prepared, 1)["frozen weights"] / held - 1) < 0.02
    train(tree)
    train(again)
    assert distance(adapter(tmp_path / "again", "lora"), adapter(tmp_path / "out", "lora")) < 1e-10


@pytest.mark.parametrize("kind", ["int8_weight_only", pytest.param("float8_weight_only", marks=pytest.mark.soak)])
def test_losses_and_adapters_are_those_of_peft_on_torchao_s_codes_saved_or_made(
    kind: str, made: Made, source: Path, write_rows: Rows, tmp_path: Path
) -> None:
    """Real PEFT over the layers of torchao against a job beside another; float32. The saved model gives the same bits."""
    need(kind)
    torchao: Any = pytest.importorskip("torchao.quantization")
    own = {"int8": torchao.Int8WeightOnlyConfig, "float8": torchao.Float8WeightOnlyConfig}[kind.split("_")[0]]()
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, quantization_config=TorchAoConfig(own), device_map={"": "cpu"},
        attn_implementation="eager",
    )  # fmt: skip
    save_dense(source, tmp_path / "saved", {})
    model.save_pretrained(tmp_path / "saved")
    model = perturbed_peft(str(source), "dora", tmp_path / "start", model.train())
    job = like_peft(write_rows("rows", 6, seed=3), tmp_path / "start")
    job["train"]["max_steps"] = 3
    tree = config(str(source), tmp_path / "out", write_rows, [job, JOBS[1]], quantization=TORCHAO[kind])
    tree["jobs"][1]["train"]["max_steps"] = 2
    losses = train_by_peft(model, prepare(Run.model_validate(tree)).jobs[0].data)[:3]
    train(tree)
    ours = [line["loss"] for line in steps(tmp_path / "out") if line["job"] == "job"]
    assert ours == pytest.approx(losses, rel=1e-5)
    again = {**tree, "base_model": str(tmp_path / "saved"), "quantization": None, "output_dir": str(tmp_path / "again")}
    train(again)
    one, other = (adapter(tmp_path / out, "job") for out in ("out", "again"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    other_kind = "float8_weight_only" if kind.startswith("int8") else "int8_weight_only"
    with pytest.raises(InputError, match=f"quantization is torchao {other_kind}, but .* is saved as torchao {kind}"):
        prepare(Run.model_validate({**again, "quantization": TORCHAO[other_kind]}))


def test_an_adapter_is_merged_into_what_the_codes_of_its_base_stand_for(
    made: Made, source: Path, write_rows: Rows, tmp_path: Path
) -> None:
    """Over several files; the oracle is PEFT on the dense model."""
    codes, dense, _ = made("fp8")
    job = {**JOBS[3], "train": {**JOBS[3]["train"], "max_steps": 1}}
    train(config(str(codes), tmp_path / "out", write_rows, [job]))
    folder, ids = tmp_path / "out" / job["name"], torch.arange(3, 40)[None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_files, "SHARD_BYTES", 100_000)
        note = merge_adapter(folder, tmp_path / "merged")
    assert note is not None and "folded into what the base's fp8 codes stand for; the model is dense" in note
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
        want = PeftModel.from_pretrained(plain, folder)(ids).logits
        torch.testing.assert_close(merged(ids).logits, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="fp8 codes are not made here; give the base that is saved so"):
        merge_adapter(folder, tmp_path / "no", str(source))


PLACES: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["lm_head", "down_proj"], "use_dora": True, "lora_dropout": 0.2},
    "copies": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]},
    "copied embedding": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "use_dora": True},
    "tokens": {"target_modules": ["gate_proj"], "trainable_token_indices": [5, 9, 30], "bias": "lora_only"},
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["packed int4", "int8_weight_only", "gptq"])
def test_jobs_on_any_module_beside_codes_are_those_beside_dense_weights_resumed_and_merged(
    kind: str, made: Made, write_rows: Rows, tmp_path: Path
) -> None:
    codes, dense, quantization = made(kind)
    train_keys = {"global_batch_size": 2, "max_steps": 3, "learning_rate": 3e-3}
    jobs = [
        {
            "name": name,
            "data": {"path": write_rows(name, 6, seed=seed)},
            "adapter": {"r": 3, **own},
            "train": train_keys,
        }
        for seed, (name, own) in enumerate(PLACES.items())
    ]
    jobs = [job | {"name": job["name"].replace(" ", "-")} for job in jobs]
    tree = config(str(dense), tmp_path / "dense", write_rows, jobs, dtype="float64", save_every=1)
    train(tree)
    again = {**tree, "base_model": str(codes), "quantization": quantization, "output_dir": str(tmp_path / "codes")}
    again |= {"gradient_checkpointing": True, "max_tokens_per_microbatch": 120}
    train(again, max_steps=1)
    train(again, resume=True)
    ids = torch.arange(3, 40)[None]
    for job in jobs:
        folder = tmp_path / "codes" / job["name"]
        assert distance(adapter(tmp_path / "codes", job["name"]), adapter(tmp_path / "dense", job["name"])) < 1e-9
        merge_adapter(folder, tmp_path / f"merged-{job['name']}")
        with torch.no_grad():
            merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"merged-{job['name']}", dtype=torch.float32)
            plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
            want = PeftModel.from_pretrained(plain, folder)(ids).logits
            torch.testing.assert_close(merged(ids).logits, want, rtol=1e-4, atol=1e-3)


def test_an_adapter_of_torchao_s_codes_is_merged_into_them(made: Made, write_rows: Rows, tmp_path: Path) -> None:
    _, dense, quantization = made("int8_weight_only")
    codes, _, _ = made("int8_weight_only")
    job = {**JOBS[0], "train": {**JOBS[0]["train"], "max_steps": 1}}
    train(config(str(codes), tmp_path / "out", write_rows, [job], quantization=quantization))
    note = merge_adapter(tmp_path / "out" / "lora", tmp_path / "merged")
    assert note is not None and "torchao int8_weight_only codes of the base stand for" in note
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
        want = PeftModel.from_pretrained(plain, tmp_path / "out" / "lora")(ids).logits
        torch.testing.assert_close(merged(ids).logits, want, rtol=1e-4, atol=1e-4)


COMPRESSED = FORMATS["int8"][1]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"quant_method": "hqq"}, r"is quantised by hqq; this version takes floats, and .*gptq"),
        ({"quant_method": "gptq", "bits": 4}, r"quantization_config of gptq cannot be read \(KeyError: 'group_size'\)"),
        (
            {**FORMATS["fp8"][1], "modules_to_not_convert": [5]},
            r"modules_to_not_convert is \[5\], and not a list of names",
        ),
        ({**FORMATS["fp8"][1], "modules_to_not_convert": "q_proj"}, "is 'q_proj', and not a list of names"),
        ({**COMPRESSED, "ignore": ["lm_head", "re:("]}, r"of compressed-tensors cannot be read .*ignore has 're:\('"),
        ({**FORMATS["gptq"][1], "modules_in_block_to_quantize": ["q_proj"]}, "and not a list of lists of names"),
        ({**FORMATS["awq"][1], "version": "gemv"}, "by awq with version gemv, and not gemm"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "by fp8 with fmt 'e5m2'"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"a": {}}}}, "with a transform_config"),
        ({**COMPRESSED, "quantization_status": "frozen"}, "with quantization_status frozen, and not compressed"),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig", "_data": {}}}},
            "by torchao with FqnToConfig",
        ),
    ],
)
def test_codes_that_are_not_read_are_refused_by_name(
    told: dict[str, Any], said: str, source: Path, write_rows: Rows, tmp_path: Path
) -> None:
    save_dense(source, tmp_path / "base", {})
    write_config(tmp_path / "base", told)
    with pytest.raises(InputError, match=said):
        prepare(Run.model_validate(config(str(tmp_path / "base"), tmp_path / "out", write_rows, JOBS[:1])))


def test_what_cannot_be_met_here_is_refused_with_the_remedy(
    source: Path, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(said: str, told: Any = None, **changes: Any) -> None:
        folder = tmp_path / "base"
        if not folder.exists():
            save_dense(source, folder, {})
        write_config(folder, told)
        with pytest.raises(InputError, match=said):
            prepare(Run.model_validate(config(str(folder), tmp_path / "out", write_rows, JOBS[:1], **changes)))

    refused("quantization is gptq, which is not made while a model is loaded", quantization="gptq")
    for changes, said in (
        ({"shard_base": True}, "parallel.shard_base does not"),
        ({"tensor": 2}, "parallel.tensor does not"),
        ({"pipeline": 2}, "parallel.pipeline does not"),
    ):
        refused(
            said + r" take quantised layers apart \(base_model .* is saved as fp8", FORMATS["fp8"][1], parallel=changes
        )
    refused("quantization is nf4, but base_model .* is saved as fp8", FORMATS["fp8"][1], quantization="nf4")
    find = importlib.util.find_spec
    gone = {"gptqmodel", "optimum", "compressed_tensors", "torchao"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in gone else find(name, *a))
    for kind, said in (
        ("gptq", "gptq cannot be met: gptqmodel is not installed; pip install gptqmodel optimum"),
        ("awq", "awq cannot be met: gptqmodel is not installed; pip install gptqmodel"),
        (
            "int8",
            r"compressed-tensors cannot be met: compressed_tensors is not installed; pip install 'packlora\[quant\]'",
        ),
    ):
        refused(said, FORMATS[kind][1])
    refused(r"torchao is not installed; pip install 'packlora\[quant\]'", quantization=TORCHAO["int8_weight_only"])


def int4_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchao's int4 with its two CUDA kernels (pack, product) written for a CPU: W = (code - 8) scale + zero, by groups of K.

    Returns what must be kept while they are used.
    """

    def pack(codes_NK: torch.Tensor, inner: int) -> torch.Tensor:
        N, half = codes_NK.shape
        return codes_NK.contiguous().view(torch.int32).reshape(N // 8, 2 * half // (16 * inner), 32, inner // 2)

    def product(x_TK: torch.Tensor, packed: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor:
        pairs = packed.reshape(scales.shape[1], -1).view(torch.uint8)
        codes_NK = torch.stack([pairs >> 4, pairs & 15], 2).flatten(1).float()
        scale_NK, zero_NK = (part.T.float().repeat_interleave(group, 1) for part in scales.unbind(2))
        W_NK = ((codes_NK - 8) * scale_NK + zero_NK).bfloat16()
        return (x_TK.float() @ W_NK.float().T).bfloat16()

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("_convert_weight_to_int4pack", pack, "CPU")
        library.impl("_weight_int4pack_mm", product, "CPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return library


def test_four_bits_of_torchao_are_what_their_codes_say(
    source: Path, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made in bfloat16, saved and taken as saved, beside the dense weights in float64. The kernels are ours, on a CPU."""
    need("int4_weight_only")
    kept = int4_on_a_cpu(monkeypatch)
    asked = QuantizationConfig(method="torchao", quant_type="int4_weight_only", group_size=32)
    model, codes = read_in_codes(str(source), asked, torch.bfloat16, torch.device("cpu"))
    assert len(codes) == 14 and {own.settings["group_size"] for own in codes.values()} == {32}
    exact = load_file(source / "model.safetensors")
    dense = {path: own.values(torch.float32) for path, own in codes.items()}
    for path, W_NK in dense.items():
        off = float((W_NK - exact[f"{path}.weight"]).norm() / exact[f"{path}.weight"].norm())
        assert 0.02 < off < 0.15 and torch.equal(W_NK, W_NK.bfloat16().float())
    model.save_pretrained(tmp_path / "codes")
    for file in (*source.glob("*token*"), *source.glob("*.jinja")):
        shutil.copy(file, tmp_path / "codes")
    save_dense(source, tmp_path / "plain", dense)
    whole = tmp_path / "plain" / "model.safetensors"  # what is not in codes is of bfloat16 in the other folder
    save_file({name: own.bfloat16().float() for name, own in load_file(whole).items()}, whole, {"format": "pt"})
    monkeypatch.setattr("packlora.codes.load.PACKS_INT4", ("cuda", "cpu"))
    jobs = [{**job, "train": {**job["train"], "max_steps": 2}} for job in JOBS[1::2]]
    tree = config(str(tmp_path / "plain"), tmp_path / "dense", write_rows, jobs, dtype="float64")
    train(tree)
    train({**tree, "base_model": str(tmp_path / "codes"), "output_dir": str(tmp_path / "saved")})
    for job in jobs:
        assert distance(adapter(tmp_path / "saved", job["name"]), adapter(tmp_path / "dense", job["name"])) < 1e-10
    made = {**tree, "base_model": str(source), "output_dir": str(tmp_path / "made"), "dtype": "bfloat16"}
    made |= {"quantization": asked.model_dump(exclude_none=True)}
    base, layers, (run, prepared) = loaded(made)
    held = sum(tensor.nbytes for tensor in base.model.state_dict().values())
    predicted = memory_parts(run, prepared, 1)["frozen weights"]
    assert len(layers) == 14 and abs(predicted / held - 1) < 0.02
    train(made)
    with pytest.raises(
        InputError, match=r"int4_weight_only.* is made of bfloat16, and dtype is float32; set dtype: bfloat16"
    ):
        prepare(Run.model_validate({**made, "dtype": "float32"}))
    del kept


def test_four_bits_of_torchao_are_refused_where_it_packs_none(source: Path, write_rows: Rows, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    int4 = {"method": "torchao", "quant_type": "int4_weight_only"}
    tree = config(str(source), tmp_path / "out", write_rows, JOBS[:1], quantization=int4)
    with pytest.raises(InputError, match=r"int4_weight_only, group_size 128 cannot be met: .*not for cpu; .*nf4"):
        prepare(Run.model_validate(tree))
