"""Samples longer than a limit of the model: where frequencies, windows, chunks or scales change, and what their neighbours get.

The oracle is transformers' own eager model on each sample alone; a sample that packing would compute otherwise is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import TINY
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from packlora.base.model import Base, load_base
from packlora.base.packing import packed_logits
from packlora.config import Run
from packlora.errors import InputError
from packlora.runtime.run import train

LIMIT = 32
"""Of the models here, in tokens."""
LENGTHS = (13, 90, 31, 33, 32, 57, 90, 7)
"""Of samples that are packed: below, at and above the limit."""
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0, 3.0] * 4,
    "original_max_position_embeddings": LIMIT,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3-longrope": ("Phi3Config", {"rope_parameters": LONGROPE, "original_max_position_embeddings": LIMIT}),
    "llama-longrope": ("LlamaConfig", {"rope_parameters": LONGROPE}),
    "llama-dynamic": ("LlamaConfig", {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT}),
    "phimoe-longrope": (
        "PhimoeConfig",
        {
            "num_local_experts": 4, "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.6},
        },
    ),
    "gemma3n-longrope": (
        "Gemma3nTextConfig",
        {
            "head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "laurel_rank": 8,
            "vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
            "rope_parameters": {"sliding_attention": LONGROPE, "full_attention": LONGROPE},
        },
    ),
    "gemma3-longrope-in-one-kind-of-layer": (
        "Gemma3TextConfig",
        {
            "head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": LONGROPE,
            },
        },
    ),
}  # fmt: skip
LLAMA4 = {
    "intermediate_size_mlp": 96, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "floor_scale": 8192,
    "attn_scale": 0.3, "attention_chunk_size": 8192, "moe_layers": [], "no_rope_layers": [1, 0],
    "layer_types": ["chunked_attention", "full_attention"],
}  # fmt: skip


def model_of(name: str, extra: Mapping[str, Any]) -> Any:
    """A random model, as transformers runs it, whose every part matters to the logits. In float64, where what is left is that
    models compute norms and softmax in float32; experts have no float64."""
    config = getattr(transformers, name)(**{**TINY, **extra})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.to(torch.float32 if "num_local_experts" in extra else torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def load(model: Any, folder: Path, longest: int, **changes: Any) -> Base:
    model.save_pretrained(folder)
    jobs = [{"name": "x", "data": {"path": "x"}}]
    tree = {"base_model": str(folder), "output_dir": "x", "device": "cpu", "jobs": jobs}
    tree["dtype"] = str(model.dtype).removeprefix("torch.")
    return load_base(Run.model_validate(tree | changes), None, {"x": longest})


def parts(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, TINY["vocab_size"], (length,), generator=generator) for length in lengths]


@torch.no_grad()
def packed(model: Any, samples: list[torch.Tensor], run: Callable[..., torch.Tensor] = packed_logits) -> torch.Tensor:
    ids, positions = torch.cat(samples), torch.cat([torch.arange(len(sample)) for sample in samples])
    return run(model, ids, positions, [len(sample) for sample in samples], torch.arange(len(ids)))


@torch.no_grad()
def alone(name: str, extra: Mapping[str, Any], samples: list[torch.Tensor]) -> torch.Tensor:
    """By a model that has not seen another sample: transformers keeps what a long one changed."""
    return torch.cat([model_of(name, extra)(input_ids=sample[None], use_cache=False).logits[0] for sample in samples])


@pytest.mark.sampled
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("kind", ROPES)
def test_one_long_sample_does_not_change_its_neighbours(kind: str, checkpointing: bool, tmp_path: Path) -> None:
    """Where frequencies or their scale depend on how long a sample is, they are each sample's own."""
    name, extra = ROPES[kind]
    base = load(model_of(name, extra), tmp_path, max(LENGTHS), gradient_checkpointing=checkpointing)
    samples = parts()
    want = alone(name, extra, samples)
    torch.testing.assert_close(packed(base.model, samples), want, rtol=1e-3, atol=1e-4)
    short = parts((13, 20))
    got = packed(base.model, short)  # after a row with long samples
    torch.testing.assert_close(got, alone(name, extra, short), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tokens", [55, 140])
def test_samples_that_a_dynamic_rope_stretches_are_taken_up_to_its_factor(
    tokens: int, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Up to 4 times the 32 tokens, and with the losses of transformers' model on each sample alone."""
    name, extra = ROPES["llama-dynamic"]
    model_of(name, extra).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    texts = [tokenizer.decode(part) for part in parts((20, tokens))]
    samples = [torch.tensor(tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]) for text in texts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    job = {
        "name": "a",
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "train": {"max_steps": 1, "global_batch_size": 2},
    }
    tree = {
        "base_model": str(tmp_path / "base"), "output_dir": str(tmp_path / "out"), "device": "cpu", "dtype": "float64",
        "jobs": [job],
    }  # fmt: skip
    if len(samples[1]) > 4 * LIMIT:
        with pytest.raises(InputError, match="over the model's context of 128"):
            train(Run.model_validate(tree))
        return
    train(Run.model_validate(tree))
    logits = alone(name, extra, samples).split([len(sample) for sample in samples])
    total = sum(
        torch.nn.functional.cross_entropy(own[:-1], sample[1:], reduction="sum")
        for own, sample in zip(logits, samples, strict=True)
    )
    labels = sum(len(sample) - 1 for sample in samples)
    line = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert max(map(len, samples)) > LIMIT and line["loss"] == pytest.approx(float(total) / labels, abs=1e-4)


WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", {"sliding_window": 64}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 64}),
    "phi3": ("Phi3Config", {"sliding_window": 64}),
}  # fmt: skip
NOT_PASSED_ON: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "a-window-in-the-mask-alone": ("PhimoeConfig", {"num_local_experts": 4, "sliding_window": 64}, 64, "sliding_window 64"),
    "chunks": ("Llama4TextConfig", LLAMA4 | {"attention_chunk_size": 64}, 64, "attention_chunk_size 64"),
    "a-scale-by-place-in-the-row": ("Llama4TextConfig", LLAMA4 | {"floor_scale": 70}, 69, "floor_scale 70"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_window_longer_than_the_short_probes_is_kept_to(kind: str, tmp_path: Path) -> None:
    name, extra = WINDOWS[kind]
    samples = parts((30, 100, 64, 65))
    base = load(model_of(name, extra), tmp_path, 100)
    torch.testing.assert_close(packed(base.model, samples), alone(name, extra, samples), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", NOT_PASSED_ON)
def test_samples_beyond_a_limit_that_packed_attention_is_not_told_of_are_refused_and_others_are_right(
    kind: str, tmp_path: Path
) -> None:
    name, extra, limit, named = NOT_PASSED_ON[kind]
    with pytest.raises(InputError, match=f"more than {limit} tokens") as caught:
        load(model_of(name, extra), tmp_path, limit + 1)
    assert named in str(caught.value)
    assert f"'x' has samples of up to {limit + 1}; set data.max_length to {limit}" in str(caught.value)
    samples = parts((30, limit, 7, limit - 1))
    base = load(model_of(name, extra), tmp_path, limit)
    torch.testing.assert_close(packed(base.model, samples), alone(name, extra, samples), rtol=1e-3, atol=1e-4)


def run_tree(folder: Path, out: Path, jobs: Mapping[str, str]) -> dict[str, Any]:
    settings = {
        "adapter": {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0},
        "train": {"global_batch_size": 2, "num_train_epochs": 1, "learning_rate": 0.01},
    }
    return {
        "base_model": str(folder), "output_dir": str(out), "device": "cpu", "dtype": "float32",
        "max_tokens_per_microbatch": 512,
        "jobs": [{"name": name, "data": {"path": path}, **settings} for name, path in jobs.items()],
    }  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """A job of short samples and one that has long ones beside short ones."""
    paths = {}
    for name, lengths in (("short", (4, 6, 3, 5)), ("long", (70, 4, 80, 5))):
        rows = [{"prompt": "the quick brown", "completion": " ".join(["fox jumps"] * length)} for length in lengths]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths[name] = str(tmp_path / f"{name}.jsonl")
    return paths


def test_a_job_beside_one_of_long_samples_trains_as_it_does_alone(
    data: dict[str, str], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    name, extra = ROPES["llama-longrope"]
    model_of(name, extra).float().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    adapters = []
    for jobs in ({"short": data["short"]}, data):
        out = tmp_path / f"out{len(jobs)}"
        assert train(Run.model_validate(run_tree(tmp_path / "base", out, jobs))).status == "done"
        adapters.append(load_file(out / "short" / "adapter_model.safetensors"))
    for key, tensor in adapters[0].items():
        torch.testing.assert_close(adapters[1][key], tensor, rtol=1e-5, atol=1e-7)


def test_samples_beyond_a_limit_end_the_run_before_it_begins_with_the_name_of_their_job(
    data: dict[str, str], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    name, extra, limit, _ = NOT_PASSED_ON["chunks"]
    model_of(name, extra).float().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    with pytest.raises(InputError, match=f"Job 'long' has samples of up to [0-9]+; set data.max_length to {limit}"):
        train(Run.model_validate(run_tree(tmp_path / "base", tmp_path / "out", data)))
    assert not (tmp_path / "out").exists()
    tree = run_tree(tmp_path / "base", tmp_path / "out", data)
    tree["jobs"][1]["data"] |= {"max_length": limit, "truncate": "right"}
    assert train(Run.model_validate(tree)).status == "done"
