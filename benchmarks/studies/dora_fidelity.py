"""How near are DoRA's logits to the exact ones, and to PEFT's? With trained-looking adapters on a real model.

    python -m benchmarks dora-fidelity --out benchmarks/results/dora-fidelity-cpu.json --device cpu
    python -m benchmarks dora-fidelity --out benchmarks/results/dora-fidelity-h200.json --random-weights

B is not zero and the magnitudes are moved, so that g is away from 1: right after get_peft_model any composition gives the same
logits. The exact logits are those of real PEFT in float64 on the very same (rounded) numbers.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.results import check_writable, device_slug, write_results
from packlora.base.demo_model import demo_model_folder
from packlora.base.device import choose_device
from packlora.live.accelerate import accelerate

DATA = Path(__file__).parents[2] / "examples" / "data" / "debian_synopsis"
RANK = 16
REGIMES = {
    "fp32": (torch.float32, False), "bf16": (torch.bfloat16, False), "bf16_autocast": (torch.bfloat16, True),
    "fp16": (torch.float16, False),
}  # fmt: skip
"""Of the base model; whether adapters are float32 under torch.autocast, PEFT's default, instead of the base's dtype."""
PROTOCOL = (
    "{model}; DoRA r {rank}, alpha {alpha} on all linear layers, B normal with deviation 0.02, magnitudes multiplied by 1 +"
    " 0.02 normal. {samples} samples of debian_synopsis/eval of at most {length} tokens ({tokens}), padded, no dropout. Per"
    " real token the cosine of the logits of two models, computed in float64; smallest, the hundredth part, mean over "
    "tokens. exact: real PEFT in float64 on the same rounded parameters. packlora: packlora.accelerate on the PEFT model. "
    "base_exact: the model without an adapter against itself in float64, which is what the dtype alone costs. Regimes: base"
    " and adapters in one dtype; bf16_autocast: bfloat16 base, float32 adapters under torch.autocast. logit_cosine_min is "
    "packlora against PEFT, the smallest of all regimes; _float32: that of fp32 alone. logit_cosine_16bit_minus_peft: "
    "packlora's smallest to exact less PEFT's, the least over the three other regimes."
)
SMOLLM2_135M: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}  # fmt: skip


# --- the model and the samples, also for dora_convergence ---------------------------------------------------------------


def load_base(random_weights: bool, tiny: bool = False) -> tuple[Any, Any, str]:
    """SmolLM2-135M-Instruct in float32, frozen, its tokenizer, and what it is in words.

    Args:
        random_weights: the same shape with random weights, the same each time, and bytes for tokens (tokenizer None).
        tiny: a toy of random weights, for tests.
    """
    if not (random_weights or tiny):
        folder = demo_model_folder()
        base = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
        words = "SmolLM2-135M-Instruct (real weights)"
        return base.requires_grad_(False), AutoTokenizer.from_pretrained(folder, trust_remote_code=False), words
    small = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**(SMOLLM2_135M | (small | heads if tiny else {})), attn_implementation="sdpa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = LlamaForCausalLM(config)
    name = "a toy model" if tiny else "SmolLM2-135M's shape"
    return base.requires_grad_(False), None, f"{name} with RANDOM weights, the bytes of the text as tokens"


def samples(file: str, count: int, length: int, tokenizer: Any) -> list[list[int]]:
    """Token ids of prompt and completion of the first rows, cut at `length`. Without a tokenizer, bytes, and the prompt's first
    paragraph is left out: the instruction, 45 bytes that all rows have."""
    rows = [json.loads(line) for line in (DATA / file).read_text().splitlines()[:count]]
    texts = [f"{row['prompt']} {row['completion']}" for row in rows]
    if tokenizer is None:
        texts = [text.partition("\n\n")[2] for text in texts]
    every = [list(text.encode()) if tokenizer is None else tokenizer(text)["input_ids"] for text in texts]
    return [ids[:length] for ids in every]


def padded(every: list[list[int]], device: torch.device, length: int | None = None) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask and labels of a batch, to `length` or the longest; labels -100 on padding."""
    width = length or max(len(ids) for ids in every)
    ids_BS, mask_BS = torch.zeros(len(every), width, dtype=torch.long), torch.zeros(len(every), width, dtype=torch.long)
    for row, ids in enumerate(every):
        ids_BS[row, : len(ids)], mask_BS[row, : len(ids)] = torch.tensor(ids), 1
    batch = {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": ids_BS.masked_fill(mask_BS == 0, -100)}
    return {name: value.to(device) for name, value in batch.items()}


def with_adapter(base: Any, rank: int, wide: bool, dora: bool = True) -> Any:
    """The model under PEFT, DoRA or LoRA on all linear layers, no dropout. wide: float32 adapters on a narrower base."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=dora)
    return get_peft_model(base, config, autocast_adapter_dtype=wide)


# --- the comparison ----------------------------------------------------------------------------------------------------


def trained_looking(model: Any) -> None:
    """Draw B, move the magnitudes."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
            elif "lora_magnitude" in name:
                parameter.mul_(1 + 0.02 * torch.randn_like(parameter))


@torch.no_grad()
def logits(model: Any, batch: dict[str, torch.Tensor], autocast: bool) -> torch.Tensor:
    """Of the real tokens, [tokens, V] in float64 on the CPU. In training mode, where PEFT makes the norms anew."""
    model.train()
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=autocast):
        out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    return out[batch["attention_mask"] == 1].double().cpu()  # type: ignore[no-any-return]


def cosines(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=1)
    return {"min": float(cosine.min()), "hundredth": float(cosine.quantile(0.01)), "mean": float(cosine.mean())}


def compare(base: Any, regime: str, batch: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
    """One regime's row.

    Raises:
        AssertionError: a module was left to PEFT.
    """
    dtype, autocast = REGIMES[regime]
    device = batch["input_ids"].device
    torch.manual_seed(0)
    bare = copy.deepcopy(base).to(device, dtype)
    floor = cosines(logits(bare, batch, False), logits(copy.deepcopy(bare).double(), batch, False))
    model = with_adapter(bare, rank, wide=autocast)
    trained_looking(model)
    exact = logits(copy.deepcopy(model).double(), batch, False)
    peft = logits(model, batch, autocast)
    report = accelerate(model)
    assert report.accelerated == len(report.modules), f"not all modules were accelerated: {report}"
    ours = logits(model, batch, autocast)
    return {
        "case": regime, "tokens": len(ours), "packlora_peft": cosines(ours, peft), "packlora_exact": cosines(ours, exact),
        "peft_exact": cosines(peft, exact), "base_exact": floor,
        "plans": sorted({str(module.plan) for module in report.modules}),
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By regime the smallest cosine of each pair, and the figures that are quoted; see PROTOCOL."""
    by_regime = {row["case"]: row for row in rows}
    out: dict[str, Any] = {
        "logit_cosine_min": min(row["packlora_peft"]["min"] for row in rows),
        "logit_cosine_min_float32": by_regime["fp32"]["packlora_peft"]["min"],
        "logit_cosine_16bit_minus_peft": min(
            row["packlora_exact"]["min"] - row["peft_exact"]["min"] for name, row in by_regime.items() if name != "fp32"
        ),
    }
    for row in rows:
        for pair in ("packlora_peft", "packlora_exact", "peft_exact", "base_exact"):
            out[f"{row['case']}_{pair}_min"] = row[pair]["min"]
    return out


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument(
        "--random-weights", action="store_true", help="SmolLM2-135M's shape where its weights are not at hand"
    )
    parser.add_argument("--tiny", action="store_true", help="a toy, to try the script")
    args = parser.parse_args(arguments)
    check_writable(args.out)
    device = choose_device(args.device)
    base, tokenizer, words = load_base(args.random_weights, args.tiny)
    batch = padded(samples("eval.jsonl", args.samples, args.length, tokenizer), device)
    rank = 4 if args.tiny else RANK
    rows = []
    for regime in REGIMES:
        rows.append({**compare(base, regime, batch, rank), "random_weights": args.random_weights or args.tiny})
        print(rows[-1], flush=True)
    protocol = PROTOCOL.format(
        model=words, rank=rank, alpha=2 * rank, samples=args.samples, length=args.length, tokens=rows[0]["tokens"]
    )
    write_results(args.out, f"dora-fidelity-{device_slug(device)}", protocol, rows, summary(rows), str(device))


if __name__ == "__main__":
    main()
