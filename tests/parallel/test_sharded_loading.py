"""Loading a base model onto several ranks: each reads its own rows, gets the bits that transformers would give them, and never
holds the model."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import FAMILIES, tiny_model
from ranks import Ranks
from safetensors.torch import load_file, save_file
from seeds import SOAK
from sharded_runs import Case, base_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from packlora.base import weight_files
from packlora.base.fingerprint import fingerprint
from packlora.base.load import read_model
from packlora.base.weight_files import WeightFiles, keys_of
from packlora.parallel import sharded
from packlora.parallel.sharded import Shards, empty_model

ODD: dict[str, Any] = {"num_hidden_layers": 3, "vocab_size": 321, "intermediate_size": 97}
LIKE_OTHERS = ("mistral", "qwen2-window", "gemma", "gemma2", "qwen3", "gpt_neox")
"""Whose weights are laid out as those of families that are loaded in every run of the tests."""
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "gpt_neox": ("GPTNeoXConfig", {"hidden_size": 64, "num_attention_heads": 4}),
    "opt": ("OPTConfig", {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 97, "num_attention_heads": 4}),
    "deepseek_v3": (  # keeps a buffer of its routers in float32
        "DeepseekV3Config",
        {
            "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 4, "n_routed_experts": 5, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "longrope": (
        "Phi3Config",
        {
            "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "original_max_position_embeddings": 32,
            "max_position_embeddings": 64, "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0] * 8, "short_factor": [1.0] * 8,
            },
        },
    ),
}  # fmt: skip


def saved(kind: str, path: Path, dtype: torch.dtype = torch.float32, **how: Any) -> str:
    """A folder with a random model of a family, in several files unless they are said to be larger."""
    if kind in OTHERS:
        name, sizes = OTHERS[kind]
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**ODD, **sizes})).to(dtype)
    else:
        model = tiny_model(kind, dtype, **ODD)
    model.save_pretrained(path, **{"max_shard_size": "150KB", "save_original_format": kind != "deepseek_v3"} | how)
    return str(path)


def load(folder: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, WeightFiles]:
    """On one rank of all."""
    files, model = WeightFiles(folder, None), empty_model(folder, None, dtype)
    Shards(model, init_device_mesh("cpu", (dist.get_world_size(),)), files, keys_of(model, files))
    return model, files


def held(model: PreTrainedModel) -> int:
    """Bytes of a rank's rows, and of the buffers that it has whole."""
    rows = {id(p): p.to_local() for p in model.parameters() if isinstance(p, DTensor)}
    return sum(t.numel() * t.element_size() for t in [*rows.values(), *model.buffers()])


# --- the bits ----------------------------------------------------------------------------------------------------------


def compared(rank: int, folder: str, dtype: torch.dtype) -> tuple[list[str], bool, float]:
    """Names of weights and buffers that are not what transformers loads; whether the fingerprint is that of the whole model;
    bytes read, in those that this rank holds."""
    model, files = load(folder, dtype)
    whole = read_model(folder, None, dtype)
    odd = []
    wanted = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers(remove_duplicate=False))
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name in wanted.keys() | found.keys():
        own, want = found.get(name), wanted.get(name)
        if isinstance(own, DTensor):
            share = -(-own.shape[0] // dist.get_world_size())
            assert own.to_local().shape[0] <= share
            own = own.full_tensor()
        if own is None or want is None or own.dtype != want.dtype or not torch.equal(own, want):
            odd.append(name)
    if len({id(p) for p in whole.parameters()}) != len({id(p) for p in model.parameters()}):
        odd.append("other weights are tied")
    same = fingerprint(model, folder, None) == fingerprint(whole, folder, None)
    return odd, same, files.bytes_read / held(model)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.soak] * (kind in LIKE_OTHERS)) for kind in [*FAMILIES, *OTHERS]]
)
def test_every_weight_and_buffer_is_what_transformers_loads(
    kind: str, tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    folder = saved(kind, tmp_path)
    assert Path(folder, "model.safetensors.index.json").exists()
    every = SOAK or kind in ("llama", "deepseek_v3")  # the latter keeps a buffer in float32
    for dtype in (torch.float32, torch.bfloat16) if every else (torch.bfloat16,):
        for odd, same, read in ranks(3).run(compared, folder, dtype):
            assert odd == [] and same
            assert read <= 1.1 * (4 / dtype.itemsize)


def test_files_of_another_type_and_a_single_file_are_read_too(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    folder = saved("gemma2", tmp_path, torch.bfloat16, max_shard_size="1GB")
    assert not Path(folder, "model.safetensors.index.json").exists()
    for dtype in (torch.float64, torch.float16):
        assert [found[:2] for found in ranks(3).run(compared, folder, dtype)] == [([], True)] * 3


# --- names -------------------------------------------------------------------------------------------------------------


def rewritten(folder: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], **config: Any) -> str:
    """The folder with its weights in one file, changed."""
    tensors = {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}
    for file in [*Path(folder).glob("*.safetensors"), *Path(folder).glob("*.index.json")]:
        file.unlink()
    save_file(
        {name: t.contiguous().clone() for name, t in change(tensors).items()},
        Path(folder, "model.safetensors"),
        {"format": "pt"},
    )
    told = Path(folder, "config.json")
    told.write_text(json.dumps(json.loads(told.read_text()) | config))
    return folder


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (lambda t: {name.removeprefix("model."): x for name, x in t.items()}, {}),
        (lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]}, {}),
        (lambda t: {name.replace("model.embed_tokens", "lm_head"): x for name, x in t.items()}, {}),
        (lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].flip(0)}, {}),
        (lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, {}),
    ],
    ids=[
        "of the decoder alone",
        "tied and both there",
        "tied and the other there",
        "tied but not equal",
        "old buffers",
    ],
)
def test_names_and_ties_are_as_transformers_takes_them(
    change: Any, config: dict[str, Any], tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    folder = rewritten(saved("gemma2", tmp_path), change, **config)
    assert [found[:2] for found in ranks(3).run(compared, folder, torch.float32)] == [([], True)] * 3


def refused(rank: int, folder: str) -> str:
    try:
        base_of(folder, Case(), sharded=True)
    except sharded.InputError as error:
        return str(error)
    return "loaded"


def without(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def not_finite(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = math.nan
    tensors["model.layers.2.mlp.up_proj.weight"][-1, -1] = math.inf
    return tensors


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("model.norm.weight"), "the weight files lack 1 weight of the model .*: model.norm.weight"),
        (without("lm_head.weight"), "the weight files lack 1 weight of the model .*: lm_head.weight"),
        (lambda t: t | {"model.more.weight": torch.ones(3)}, "hold 1 weight that the model has no place for"),
        (
            lambda t: t | {"model.norm.weight": torch.ones(63)},
            r"of another shape than config.json says: model.norm.weight is \[63\], not \[64\]",
        ),
        (not_finite, r"hold NaN or infinity: model.layers.1.self_attn.k_proj.weight and 1 more"),
    ],
    ids=["missing", "no output layer", "unexpected", "of another shape", "not finite"],
)
def test_weights_that_are_not_the_model_s_are_refused_on_every_rank_alike(
    change: Any, says: str, tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    folder = rewritten(saved("llama", tmp_path), change)
    found = ranks(3).run(refused, folder)
    assert len(set(found)) == 1 and re.search(says, found[0]), found


def no_experts(rank: int, folder: str) -> str:
    """The same where experts are not put together here."""
    with mock.patch.object(weight_files, "parts_of", return_value={}):
        return refused(rank, folder)


def test_experts_that_lie_apart_are_put_together_and_what_else_transformers_computes_is_refused_by_name(
    tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    config = transformers.MixtralConfig(
        **ODD, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_local_experts=5
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "original")
    for odd, same, read in ranks(3).run(compared, str(tmp_path / "original"), torch.float32):
        assert odd == [] and same and read <= 1.1
    found = ranks(3).run(no_experts, str(tmp_path / "original"))
    assert len(set(found)) == 1
    assert re.search(r"but model.layers.0.mlp.experts.\w+ of a mixtral model is computed from others", found[0])
    model.save_pretrained(tmp_path / "as it is", save_original_format=False)
    for odd, same, read in ranks(3).run(compared, str(tmp_path / "as it is"), torch.float32):
        assert odd == [] and same and read <= 1.1


def test_a_folder_without_safetensors_is_refused(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    folder = saved("llama", tmp_path)
    for file in Path(folder).glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    assert all("a pickle" in text for text in ranks(3).run(refused, folder))


# --- memory --------------------------------------------------------------------------------------------------------------


def peak_of(run: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and how many bytes of memory this process had at most meanwhile, beside those that it had before."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")

    def status(name: str) -> int:
        return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # type: ignore[index]

    before = status("VmRSS")
    return run(), status("VmHWM") - before


def memory(rank: int, folder: str, case: Case, whole: bool) -> dict[str, int]:
    """Bytes: of the model, of this rank's part, of what is gathered for a layer; at the peak of loading, and with the proof."""
    (model, files), peak = peak_of(lambda: load(folder))
    gathered = [sum(p.numel() * 4 for p in m.parameters()) for m in model.modules() if isinstance(m, FSDPModule)]
    sizes = {"model": gathered[0], "part": held(model), "layer": gathered[1], "read": files.bytes_read, "loading": peak}
    sizes["other"] = gathered[0] - sum(gathered[1:])
    del model
    _, sizes["with proof"] = peak_of(lambda: base_of(folder, case, sharded=not whole))
    return sizes


@pytest.mark.soak
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory is read from /proc")
def test_no_rank_ever_holds_the_model(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """Of 90 MiB of weights on two ranks: 1.2 parts to load them; the proof gathers what is no layer's, and a layer,
    through a few buffers."""
    wide: dict[str, Any] = {
        "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 14, "vocab_size": 2001, "tie_word_embeddings": True,
    }  # fmt: skip
    tiny_model("llama", **wide).save_pretrained(tmp_path, max_shard_size="40MB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    group = Ranks(2)
    try:
        group.run(refused, saved("llama", tmp_path / "small"))  # what is imported at first calls is not measured
        for sizes in group.run(memory, str(tmp_path), Case(), False):
            assert sizes["model"] > 80 << 20 and sizes["part"] < 0.51 * sizes["model"]
            assert sizes["read"] <= 1.1 * sizes["part"]
            assert sizes["loading"] <= 1.2 * sizes["part"], sizes
            assert sizes["with proof"] <= 1.2 * sizes["part"] + sizes["other"] + 4 * sizes["layer"], sizes
        for sizes in group.run(memory, str(tmp_path), Case(), True):
            assert sizes["with proof"] > sizes["model"], "what is measured sees a model that is held whole"
    finally:
        group.close()
