"""Runs on a GPU whose memory is capped: they go on, with the adapters of a run with all of it, within what was predicted.

make gpu
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import packlora
from packlora.base.offload import HostCheckpoints
from packlora.engine.memory import free_memory
from packlora.run_file import run_from
from packlora.runtime.estimate import memory_parts
from packlora.runtime.fit import predicted
from packlora.runtime.prepare import prepare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
GIB, ERROR = 2**30, 0.05
"""ERROR: of the estimate, which nine measured peaks keep to."""
LENGTH, DEVICE = 2048, "cuda"
LAYERS = {8: 6, 12: 12, 16: 18, 24: 32}
"""Layers of the 8B shape, by GiB of the cap: too many for microbatches of 4096 tokens by the defaults."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[[int], str]:
    """layers -> folder of a model of the 8B shape with that many; a vocabulary of 32000."""
    made: dict[int, str] = {}

    def make(layers: int) -> str:
        if layers not in made:
            folder = tmp_path_factory.mktemp(f"layers{layers}")
            config = transformers.LlamaConfig(
                hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
                num_key_value_heads=8, vocab_size=32000, max_position_embeddings=8192, rms_norm_eps=1e-5,
            )  # fmt: skip
            with torch.device(DEVICE):
                torch.manual_seed(0)
                torch.set_default_dtype(torch.bfloat16)
                try:
                    model = transformers.LlamaForCausalLM(config)
                finally:
                    torch.set_default_dtype(torch.float32)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            del model
            free_memory(torch.device(DEVICE))
            made[layers] = str(folder)
        return made[layers]

    return make


@pytest.fixture
def cap() -> Iterator[Callable[[float], None]]:
    """GiB -> caps the memory of this process."""
    total = torch.cuda.get_device_properties(0).total_memory

    def set_cap(gib: float) -> None:
        free_memory(torch.device(DEVICE))
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(gib * GIB / total)

    yield set_cap
    torch.cuda.set_per_process_memory_fraction(1.0)
    free_memory(torch.device(DEVICE))


def tree_of(base: str, out: Path, rows: Path, **keys: Any) -> dict[str, Any]:
    """LoRA r 16 on all linear layers, two steps of two samples of 2048 tokens."""
    if not rows.exists():
        ids = torch.randint(3, 300, (4, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
        rows.write_text("".join(json.dumps({"input_ids": own}) + "\n" for own in ids))
    job = {
        "name": "a", "data": {"path": str(rows)}, "adapter": {"r": 16},
        "train": {"global_batch_size": 2, "max_steps": 2, "learning_rate": 1e-4},
    }  # fmt: skip
    tree = {"base_model": base, "output_dir": str(out), "dtype": "bfloat16", "device": DEVICE, "jobs": [job]}
    return tree | {"save_every": 0, "cuda_graphs": False} | keys


def trained(tree: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The adapter, and run.json."""
    torch.cuda.reset_peak_memory_stats()
    out = Path(packlora.train(tree).output_dir)
    return load_file(out / "a" / "adapter_model.safetensors"), json.loads((out / "run.json").read_text())


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    """Adapters of microbatches of other sizes: sums of bfloat16 gradients round otherwise. B, from zero, is what was learnt."""
    learnt = [key for key in want if "lora_B" in key]
    error = sum((got[key].double() - want[key].double()).square().sum() for key in learnt)
    return float((error / sum(want[key].double().square().sum() for key in learnt)) ** 0.5) < 0.1


@pytest.mark.parametrize("gib", sorted(LAYERS))
def test_a_run_on_a_small_card_goes_on_within_what_was_predicted(
    gib: int, base: Callable[[int], str], cap: Callable[[float], None], tmp_path: Path
) -> None:
    model = base(LAYERS[gib])
    want, _ = trained(tree_of(model, tmp_path / "plenty", tmp_path / "rows.jsonl"))
    cap(gib)
    got, record = trained(tree_of(model, tmp_path / "capped", tmp_path / "rows.jsonl"))
    assert record["fit"].keys() > {"predicted_bytes"} or record["fit"]["predicted_bytes"] < 0.92 * gib * GIB
    assert record["result"]["peak_memory_bytes"] <= (1 + ERROR) * record["fit"]["predicted_bytes"]
    assert record["result"]["peak_memory_bytes"] <= gib * GIB
    assert close(got, want)


@pytest.mark.parametrize("graphs", [False, "auto"])
def test_memory_that_runs_out_in_training_is_answered_by_smaller_microbatches_then_checkpointing(
    graphs: Any, base: Callable[[int], str], cap: Callable[[float], None], tmp_path: Path
) -> None:
    """The cap comes after the choice, as another process would: between weights and one sample without checkpointing."""
    model = base(LAYERS[8])
    tree = tree_of(model, tmp_path / "plenty", tmp_path / "rows.jsonl", cuda_graphs=graphs)
    want, _ = trained(tree)
    prepared = prepare(run_from(tree))
    parts = memory_parts(prepared.run, prepared, LENGTH)
    least = sum(parts.values()) - parts["activations"] // 2

    def late(event: Any) -> None:
        if isinstance(event, packlora.events.TrainingBegan):
            cap(least / GIB)

    out = tmp_path / "capped"
    packlora.train({**tree, "output_dir": str(out)}, subscribers=[late])
    record = json.loads((out / "run.json").read_text())
    assert record["fit"]["gradient_checkpointing"] is True and record["fit"]["max_tokens_per_microbatch"] == LENGTH
    assert close(load_file(out / "a" / "adapter_model.safetensors"), want)


def test_offload_gives_the_bits_of_checkpointing_in_less_memory(
    base: Callable[[int], str], cap: Callable[[float], None], tmp_path: Path
) -> None:
    """Twelve layers keep 16 MiB each of a sample."""
    found = {}
    for how in (True, "offload"):
        tree = tree_of(base(LAYERS[12]), tmp_path / str(how), tmp_path / "rows.jsonl", gradient_checkpointing=how)
        found[how] = trained(tree)
    (want, first), (got, second) = found[True], found["offload"]
    assert all(torch.equal(got[key], want[key]) for key in want)
    saved = first["result"]["peak_memory_bytes"] - second["result"]["peak_memory_bytes"]
    run = prepare(run_from(tree_of(base(LAYERS[12]), tmp_path / "no", tmp_path / "rows.jsonl"))).run
    prepared = prepare(run)
    less = [
        predicted(run.model_copy(update={"gradient_checkpointing": how}), prepared, 4096) for how in (True, "offload")
    ]
    assert saved > 0.5 * (less[0] - less[1])


def test_a_checkpoint_in_the_memory_of_the_host_comes_back_as_it_was() -> None:
    held = HostCheckpoints()
    weights = [torch.randn(512, 512, device=DEVICE, requires_grad=True) for _ in range(6)]
    x = torch.randn(4096, 512, device=DEVICE)

    def out(run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        y = x
        for weight in weights:
            y = run(lambda y, weight=weight: torch.tanh(y @ weight), y)
        return list(torch.autograd.grad(y.square().sum(), weights))

    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(out(held), out(lambda layer, y: layer(y)), strict=True))
