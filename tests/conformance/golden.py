"""Golden bits: hashes of what runs of seven kinds leave, to compare two trees of the package on one machine.

    PYTHONPATH=OLD_TREE python tests/conformance/golden.py --write old.json
    PYTHONPATH=NEW_TREE python tests/conformance/golden.py --against old.json

Each line is a file of a run (adapter tensors, held-out losses, losses and norms of steps) and its hash. Bits depend on the
processor and on torch's build, so no hash is stored: the old tree is run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))

import conftest
import numpy as np
import torch
import transformers
from conftest import WORDS, rows_into, tiny_model
from ranks import Ranks
from safetensors.torch import load_file

Tree = dict[str, Any]
TIMES = {"seconds", "elapsed"}
"""Keys of a line that a clock gives."""


def pairs(path: Path, number: int, seed: int, judged: bool = False) -> str:
    """Rows with a chosen and a rejected completion, or with a completion and a judgement of it."""
    draw = np.random.default_rng(seed)

    def text(least: int, most: int) -> str:
        return " ".join(WORDS[n] for n in draw.integers(0, len(WORDS), draw.integers(least, most)))

    def row(n: int) -> dict[str, Any]:
        if judged:
            return {"prompt": text(2, 6), "completion": text(1, 9), "label": bool(n % 3)}
        return {"prompt": text(2, 6), "chosen": text(1, 9), "rejected": f"not {text(1, 9)}"}

    path.write_text("".join(json.dumps(row(n)) + "\n" for n in range(number)))
    return str(path)


def job(name: str, path: str, adapter: Tree, **train: Any) -> Tree:
    """Job of a run file with three steps of four samples, unless `train` says otherwise."""
    return {
        "name": name,
        "data": {"path": path, "eval_path": path},
        "adapter": {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]} | adapter,
        "train": {"global_batch_size": 4, "learning_rate": 1e-2, "max_steps": 3} | train,
    }


def jobs_of(folder: Path) -> tuple[list[Tree], list[Tree], list[Tree]]:
    """Jobs that learn texts, jobs that learn preferences, and jobs of a model with experts."""
    rows = rows_into(folder)
    texts, more = rows("texts", 14, 3), rows("more", 9, 5)
    ours, said = pairs(folder / "pairs.jsonl", 11, 1), pairs(folder / "said.jsonl", 10, 2, judged=True)
    learnt = [
        job("plain", texts, {"lora_alpha": 8}),
        job("noisy", more, {"lora_dropout": 0.2, "r": 6}, neftune_noise_alpha=5.0, lr_scheduler_type="cosine"),
        job("smooth", texts, {"use_rslora": True, "r": 9}, label_smoothing_factor=0.2, max_grad_norm=0.5),
        job("dora", more, {"use_dora": True, "lora_dropout": 0.1, "target_modules": "all-linear"}, global_batch_size=3),
        job("head", texts, {"target_modules": ["o_proj", "lm_head"], "lora_dropout": 0.1}, label_smoothing_factor=0.1),
        job("saved", more, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    ]
    head = {"target_modules": ["q_proj", "up_proj", "lm_head"]}
    preferred = [
        job("beside", texts, {"lora_dropout": 0.1}, label_smoothing_factor=0.1),
        job("dpo", ours, {"lora_dropout": 0.2}, trainer="dpo", loss_type=["sigmoid", "sft", "ipo"],
            loss_weights=[0.8, 0.6, 0.1]),
        job("orpo", ours, head, trainer="orpo", beta=0.4),
        job("kto", said, {"use_dora": True}, trainer="kto", beta=0.3, desirable_weight=3.0, undesirable_weight=0.2),
    ]  # fmt: skip
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    experts = [
        job("routed", texts, {"target_modules": "all-linear"}, router_aux_loss_coef=0.5),
        job("inside", more, {"target_modules": ["q_proj"], "target_parameters": parameters}, router_aux_loss_coef=2.0),
        job("outside", texts, {"lora_dropout": 0.1, "use_dora": True, "target_modules": ["k_proj", "o_proj"]}),
    ]
    return learnt, preferred, experts


def saved(folder: Path, model: Any, tokenizer: Any) -> str:
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def tiny_experts() -> Any:
    torch.manual_seed(4)
    sizes = conftest.TINY | {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def trained(rank: int, tree: Tree, options: Tree) -> str:
    """Status of a run, on each process."""
    import packlora

    return str(packlora.train(tree, **options).status)


def on(size: int) -> Callable[..., None]:
    """A run on so many processes, or in this one."""

    def run(tree: Tree, **options: Any) -> None:
        if size == 1:
            statuses = [trained(0, tree, options)]
        else:
            group = Ranks(size)
            statuses = group.run(trained, tree, options)
            group.close()
        assert all(status in ("done", "interrupted") for status in statuses), statuses

    return run


def hashes(out: Path) -> dict[str, str]:
    """A hash for each adapter of a run and for the numbers of each job's steps and held-out losses."""
    found = {}
    for file in sorted(out.glob("*/adapter_model.safetensors")):
        digest = hashlib.sha256()
        for key, tensor in sorted(load_file(file).items()):
            digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        found[f"{file.parent.name} adapter"] = digest.hexdigest()[:16]
    for log in ("metrics.jsonl", "evals.jsonl"):
        by_job: dict[str, list[str]] = {}
        for line in (out / log).read_text().splitlines() if (out / log).exists() else []:
            values = {key: value for key, value in json.loads(line).items() if key not in TIMES}
            by_job.setdefault(str(values["job"]), []).append(json.dumps(values, sort_keys=True))
        for name, lines in sorted(by_job.items()):
            found[f"{name} {log}"] = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return found


def golden(folder: Path) -> dict[str, str]:
    """Hashes of all runs."""
    tokenizer: Any = conftest.tokenizer.__wrapped__() if hasattr(conftest.tokenizer, "__wrapped__") else None
    tokenizer = tokenizer or conftest.tokenizer._fixture_function()
    base, routed = (
        saved(folder / "base", tiny_model("llama"), tokenizer),
        saved(folder / "moe", tiny_experts(), tokenizer),
    )
    learnt, preferred, experts = jobs_of(folder)
    common: Tree = {
        "device": "cpu",
        "dtype": "float32",
        "max_tokens_per_microbatch": 150,
        "save_every": 2,
        "eval_every": 2,
    }
    kinds: dict[str, tuple[int, Tree]] = {
        "texts": (1, {"base_model": base, "jobs": learnt}),
        "preferences": (1, {"base_model": base, "jobs": preferred}),
        "experts": (1, {"base_model": routed, "jobs": experts}),
        "nf4": (1, {"base_model": base, "jobs": learnt[:4], "quantization": "nf4", "gradient_checkpointing": True}),
        "pipeline": (2, {"base_model": base, "jobs": [*learnt[:2], *preferred[1:]], "parallel": {"pipeline": 2}}),
        "sharded": (2, {"base_model": base, "jobs": [*learnt[1:4], preferred[1]], "parallel": {"shard_base": True}}),
        "tensor": (
            2,
            {"base_model": base, "jobs": [*learnt[:4], preferred[1], preferred[3]], "parallel": {"tensor": 2}},
        ),
    }
    found = {}
    for kind, (size, own) in kinds.items():
        out = folder / kind
        tree = common | own | {"output_dir": str(out)}
        on(size)(tree, max_steps=2)
        on(size)(tree, resume=True)
        found |= {f"{kind} {name}": value for name, value in hashes(out).items()}
        print(f"{kind}: {len(hashes(out))} hashes", file=sys.stderr)
    return found


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--write", type=Path, help="where the hashes go")
    arguments.add_argument("--against", type=Path, help="hashes of another tree, as --write leaves them")
    asked = arguments.parse_args()
    os.environ["PYTHONHASHSEED"] = "0"
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        found = golden(Path(folder))
    if asked.write is not None:
        asked.write.write_text(json.dumps(found, indent=1))
    if asked.against is None:
        return 0
    wanted = json.loads(asked.against.read_text())
    other = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    print(*other or [f"all {len(found)} hashes are equal"], sep="\n")
    return bool(other)


if __name__ == "__main__":
    sys.exit(main())
