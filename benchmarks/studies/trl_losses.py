"""Does one line change what TRL trains? The losses of examples/trl_sft.py with packlora.accelerate and without it.

    pip install trl
    python -m benchmarks trl --out benchmarks/results/trl-cpu.json --device cpu
    python -m benchmarks trl --out benchmarks/results/trl-h200.json

The example itself is run, as it stands: TRL's SFTTrainer, PEFT's LoRA on all linear layers, no dropout, one seed. In float32,
without TF32, the losses are the same up to the order of sums. In bfloat16 both ways round, each otherwise; how far each is
from PEFT's run in float32, which starts from the very same numbers, says whether one rounds more.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import io
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.results import check_writable, device_slug, text_table, write_results
from packlora.base.demo_model import demo_model_folder
from packlora.base.device import choose_device
from packlora.errors import InputError
from packlora.live.accelerate import accelerate

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "trl_sft.py"
DATA = ROOT / "examples" / "data" / "debian_synopsis" / "train.jsonl"
DTYPES = ("float32", "bfloat16")
WAYS = ("peft", "packlora")
WARM_UP = 5
"""First steps, whose time is left out."""
PROTOCOL = (
    "examples/trl_sft.py, twice per model and dtype, with --no-accelerate (peft) and without: TRL's SFTTrainer, LoRA r 16, "
    "alpha 32 on all linear layers, no dropout, AdamW with a constant learning rate, {steps} steps on debian_synopsis/train, "
    "seed 0; TRL leaves out samples that have no completion left when they are cut. float32 without TF32; bfloat16: the base "
    "in bfloat16, adapters in float32, autocast. Models: {models}. mean_abs, max_abs: of the difference of the losses per step."
    " adapter: relative Frobenius distance of all final adapter parameters together. to_fp32: mean difference of the losses to "
    "those of peft in float32, which starts from the same numbers. ms_per_step, tokens_per_second: medians without the first "
    "{warm_up} steps, one run after the other, so no measure of which is faster. grouped: modules computed together with "
    "siblings. {device}."
)


@dataclass(frozen=True)
class Case:
    """A model and how it is trained. layers, hidden, ffn: of a Llama with random weights; 0 layers: SmolLM2-135M-Instruct."""

    name: str
    words: str
    batch: int
    length: int
    learning_rate: float = 2e-4
    layers: int = 0
    hidden: int = 0
    ffn: int = 0

    @property
    def random(self) -> bool:
        return self.layers > 0


TINY = Case("tiny", "a toy Llama with RANDOM weights", 4, 512, 1e-3, layers=2, hidden=64, ffn=96)
WIDE = Case("wide", "two layers of Llama-3.1-8B's shape with RANDOM weights", 16, 512, layers=2, hidden=4096, ffn=14336)
"""So much work that the operator serves every layer on a GPU."""
SMOLLM2 = "smollm2-135m"


def cases(device: torch.device) -> list[Case]:
    """In order; smaller batches on a CPU, and nothing wide."""
    words = "SmolLM2-135M-Instruct (real weights)"
    if device.type == "cpu":
        return [TINY, Case(SMOLLM2, words, 2, 256)]
    return [TINY, WIDE, Case(SMOLLM2, words, 16, 512)]


# --- models --------------------------------------------------------------------------------------------------------------


def model_folder(case: Case, scratch: Path) -> Path:
    """The model of a case with its tokenizer, weights stored in bfloat16, so that every dtype starts from the same numbers."""
    if not case.random:
        return demo_model_folder()
    folder = scratch / case.name
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=case.hidden, intermediate_size=case.ffn, num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // (128 if case.hidden > 1024 else 16), num_key_value_heads=case.hidden // 512 or 2,
        max_position_embeddings=case.length, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer() -> Any:
    """A token for every byte, and two for padding and the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: number for number, token in enumerate(["<pad>", "<end>", *alphabet])}
    own = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<end>")


# --- runs ----------------------------------------------------------------------------------------------------------------


def example() -> Any:
    """examples/trl_sft.py as a module.

    Raises:
        InputError: TRL, or something that it needs, is not installed.
    """
    spec = importlib.util.spec_from_file_location("trl_sft", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, RuntimeError) as error:  # TRL makes a RuntimeError of what its parts cannot import
        reason = str(error).strip().splitlines()[-1]
        raise InputError(f"trl_losses: cannot import {EXAMPLE.name}: {reason}; pip install trl") from error
    return module


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """No TF32 inside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def run(script: Any, case: Case, folder: Path, dtype: str, way: str, steps: int, on_cpu: bool) -> dict[str, Any]:
    """One run of the example: losses, final adapter parameters, speed, what was accelerated.

    Raises:
        AssertionError: a module was left to PEFT for good, or the plain run was accelerated.
    """
    with tempfile.TemporaryDirectory() as out:
        words = [str(folder), str(DATA), f"--output={out}", f"--max-steps={steps}", f"--batch-size={case.batch}"]
        words += [f"--max-length={case.length}", f"--learning-rate={case.learning_rate}", f"--dtype={dtype}"]
        words += ["--cpu"] * on_cpu + ["--no-accelerate"] * (way == "peft")
        with exact_float32(), contextlib.redirect_stdout(io.StringIO()):
            trainer = script.main(words)
    record = recorded(trainer.state.log_history, steps)
    record["adapter"] = {
        name: parameter.detach().double().cpu()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }
    if way == "packlora":
        report = accelerate(trainer.model)
        assert report.accelerated == len(report.modules), f"not all modules were accelerated: {report}"
        record["modules"], record["grouped"] = len(report.modules), sum(len(group) for group in report.groups)
    return record


def recorded(history: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Losses and speed of a Trainer's log of every step."""
    logs = [entry for entry in history if "loss" in entry]
    assert len(logs) == steps, f"{len(logs)} logs of {steps} steps"
    first = min(WARM_UP, steps - 1)
    tokens = [
        log["num_tokens"] - before for log, before in zip(logs, [0, *(log["num_tokens"] for log in logs)], strict=False)
    ]
    timed = [(count / log["tokens_per_second"], log) for count, log in zip(tokens, logs, strict=True)][first:]
    return {
        "losses": [log["loss"] for log in logs],
        "ms_per_step": 1e3 * statistics.median(seconds for seconds, _ in timed),
        "tokens_per_second": statistics.median(log["tokens_per_second"] for _, log in timed),
    }


# --- the comparison ------------------------------------------------------------------------------------------------------


def compared(case: Case, dtype: str, runs: dict[str, dict[str, Any]], exact: list[float] | None) -> dict[str, Any]:
    """A row. exact: losses of PEFT in float32, for another dtype."""
    peft, ours = (runs[way] for way in WAYS)
    gaps = differences(ours["losses"], peft["losses"])
    row = {
        "case": case.name, "dtype": dtype, "random_weights": case.random, "batch": case.batch, "length": case.length,
        "learning_rate": case.learning_rate, "steps": len(gaps), "mean_abs": sum(gaps) / len(gaps), "max_abs": max(gaps),
        "adapter": distance(ours["adapter"], peft["adapter"]), "modules": ours["modules"], "grouped": ours["grouped"],
        **{key: {way: runs[way][key] for way in WAYS} for key in ("ms_per_step", "tokens_per_second")},
        "losses_peft": peft["losses"], "losses_packlora": ours["losses"],
    }  # fmt: skip
    if exact is not None:
        row["to_fp32"] = {way: statistics.fmean(differences(runs[way]["losses"], exact)) for way in WAYS}
    return row


def differences(a: list[float], b: list[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(a, b, strict=True)]


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Relative Frobenius distance of all tensors together.

    Raises:
        AssertionError: they are not of the same names.
    """
    assert ours.keys() == theirs.keys(), f"parameters differ: {ours.keys() ^ theirs.keys()}"
    apart = sum(float((ours[name] - tensor).square().sum()) for name, tensor in theirs.items())
    return float((apart / sum(float(tensor.square().sum()) for tensor in theirs.values())) ** 0.5)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By model and dtype the differences. No speeds: the ways did not run in turn."""
    out: dict[str, Any] = {}
    for row in rows:
        name = f"{row['case'].replace('-', '_')}_{row['dtype']}"
        out |= {f"{name}_{key}": row[key] for key in ("mean_abs", "max_abs", "adapter")}
        out |= {f"{name}_{way}_to_fp32": value for way, value in row.get("to_fp32", {}).items()}
    return out


def shown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    header = ["model, dtype", "first loss", "last", "mean difference", "max", "adapter", "ms peft", "ms packlora"]
    lines = [
        [
            f"{row['case']}, {row['dtype']}", f"{row['losses_peft'][0]:.4f}", f"{row['losses_peft'][-1]:.4f}",
            *(f"{row[key]:.1e}" for key in ("mean_abs", "max_abs", "adapter")),
            *(f"{row['ms_per_step'][way]:.0f}" for way in WAYS),
        ]
        for row in rows
    ]  # fmt: skip
    return "\n".join(text_table(header, lines))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="the toy alone, to try the script")
    args = parser.parse_args(arguments)
    if args.steps < 1:
        raise InputError(f"steps: {args.steps}; accepted is 1 or more")
    check_writable(args.out)
    device = choose_device(args.device)
    script = example()
    chosen = [TINY] if args.tiny else cases(device)
    if not all(case.random for case in chosen):
        demo_model_folder()  # an error now rather than after the others
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in chosen:
            folder, exact = model_folder(case, Path(scratch)), None
            for dtype in DTYPES:
                runs = {}
                for way in WAYS:
                    runs[way] = run(script, case, folder, dtype, way, args.steps, device.type == "cpu")
                    gc.collect()
                rows.append(compared(case, dtype, runs, exact))
                exact = runs["peft"]["losses"] if dtype == "float32" else exact
                print({key: value for key, value in rows[-1].items() if not key.startswith("losses")}, flush=True)
                for way in WAYS:
                    print(f"{way:>8}:", *(f"{loss:.6f}" for loss in runs[way]["losses"]), flush=True)
    print(shown(rows))
    where = "CPU" if device.type == "cpu" else "One GPU"
    described = "; ".join(
        f"{case.name}: {case.words}, batches of {case.batch}, at most {case.length} tokens, lr {case.learning_rate}"
        for case in chosen
    )
    protocol = PROTOCOL.format(steps=args.steps, models=described, warm_up=WARM_UP, device=where)
    figures = summary(rows) | ({"part_tiny": True} if args.tiny else {})
    write_results(args.out, f"trl-{device_slug(device)}", protocol, rows, figures, str(device))


if __name__ == "__main__":
    main()
