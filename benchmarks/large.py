"""`large`: a base model that no GPU here holds, trained on all of them by the command, from its files.

    python -m benchmarks large --out large-h100.json
    python -m benchmarks large --layers 80 --out large-h100.json       # the whole shape, where the GPUs together hold it

It starts torchrun itself. The files are written to memory (/dev/shm) where there is room. The model has as many layers of one
shape as fill somewhat more than a GPU; all have the same random weights, which are written for each. One case kills a
run and goes on with it on half of the GPUs, another does so with a service (large_served.py).
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import AutoModelForCausalLM

from benchmarks.commands import WORDS, words_of, write_rows, write_tokenizer
from benchmarks.harness import Benchmark, Case, Options, Row, case
from benchmarks.large_served import fit_on, served
from benchmarks.shapes import SHAPES, TINY, config_of, spread
from benchmarks.watched import Watch, environment
from packlora.engine.memory import free_memory
from packlora.errors import InputError

SHAPE, MORE = "Llama-3.1-70B", 1.05
"""Shape of the layers, and bytes of all weights over those of a GPU's memory."""
OFFLOADED: Row = {"shard_base": True, "offload_base": True}
WAYS: dict[str, Row] = {
    "sharded": {"shard_base": True},
    "stages": {},
    "resumed": {"shard_base": True},
    "offloaded": OFFLOADED,
}
"""Layouts; the stages are as many as there are GPUs. resumed: killed after a step, and gone on with on half of the GPUs, with
their part of the base on the host where these do not hold it."""
SERVED = "served"
"""The case of the service, beside the layouts."""
RANKS, LENGTH, BATCH, STEPS = (16, 32), 1024, 8, 4
"""Jobs by rank; tokens of a sample, samples of a step, steps of each."""
LIMIT = 240.0
"""Seconds after which a run is killed."""


def cases(options: Options) -> list[Case]:
    return [case(name, parallel=name) for name in (*WAYS, SERVED)]


def measure(one: Case, names: list[str], options: Options) -> Row:
    """Raises InputError where there is one GPU."""
    size = 2 if options.tiny else torch.cuda.device_count()
    if size < 2:
        raise InputError("large needs two GPUs or more")
    start = time.perf_counter()
    folder, layers, weights = options.shared("large", lambda: written(options))
    print(f"{time.perf_counter() - start:7.1f} s: files of {weights / 2**30:.1f} GiB are there", flush=True)
    start = time.perf_counter()
    row: Row = {"layers": layers, "weights_gib": weights / 2**30, "processes": size}
    if one.parallel == SERVED:
        return row | served(Path(folder.name), size, BATCH, length_of(options), weights, options.device)
    parallel = WAYS[one.parallel] or {"pipeline": size}
    if one.parallel == "resumed":
        fits = fit_on(size // 2, weights, options.device)
        return row | resumed(Path(folder.name), parallel, size, {"shard_base": True} if fits else OFFLOADED)
    code, said, host = launched(Path(folder.name), one.parallel, parallel, size)
    wall = time.perf_counter() - start
    row |= {"wall_s": wall, "host_gib": host}
    if code:
        return row | {"failed": {"packlora": words_of_error(said)}}
    out = Path(folder.name) / one.parallel
    result = json.loads((out / "run.json").read_text())["result"]
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    first = max(line["elapsed"] for line in steps if line["step"] == 1)
    late = sum(line["tokens"] for line in steps if line["step"] > 1)
    return row | {
        "before_training_s": wall - result["seconds"], "first_step_s": first,
        "tokens_per_s": late / (max(line["elapsed"] for line in steps) - first),
        "gib": (result["peak_memory_bytes"] or 0) / 2**30, "loss": steps[-1]["loss"], "failed": {},
    }  # fmt: skip


# --- files -------------------------------------------------------------------------------------------------------------


def written(options: Options) -> tuple[Any, int, int]:
    """A folder with base model, data and run file; the number of layers, and bytes of the weights."""
    room = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize if Path("/dev/shm").is_dir() else 0
    layers = options.layers or (4 if options.tiny else _layers(torch.cuda.get_device_properties(0).total_memory))
    cut = TINY | {"vocab_size": WORDS + 8} if options.tiny else {}
    config = config_of(SHAPE, False, None, **cut | {"num_hidden_layers": layers, "dtype": "bfloat16"})
    config.bos_token_id = config.eos_token_id = 0
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    held = skeleton.state_dict()
    bytes_ = sum(tensor.nbytes for tensor in held.values())
    folder = tempfile.TemporaryDirectory(dir="/dev/shm" if room > 1.02 * bytes_ else None)
    path = Path(folder.name)
    write_tokenizer(path / "base", WORDS)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path / "base")
    write_weights(path / "base", held, options.device)
    draw, length = np.random.default_rng(0), length_of(options)
    jobs = []
    for rank in RANKS:
        write_rows(path / f"r{rank}.jsonl", [words_of(draw, length - 1, WORDS) for _ in range(BATCH * STEPS)])
        train = {"num_train_epochs": 1, "learning_rate": 1e-4, "global_batch_size": BATCH}
        adapter = {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
        jobs.append({"name": f"r{rank}", "data": {"path": f"r{rank}.jsonl"}, "adapter": adapter, "train": train})
    tree = {
        "base_model": "base", "jobs": jobs, "dtype": "bfloat16", "max_tokens_per_microbatch": 4 * length, "save_every": 0,
        "gradient_checkpointing": True, "device": options.device.type,
    }  # fmt: skip
    (path / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder, layers, bytes_


def length_of(options: Options) -> int:
    """Tokens of a sample."""
    return 32 if options.tiny else LENGTH


def _layers(memory: int) -> int:
    """As many as need somewhat more than a GPU has, at most all."""
    shape = SHAPES[SHAPE]
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    kept = shape["num_key_value_heads"] / shape["num_attention_heads"]
    each = 2 * (width * width * (2 + 2 * kept) + 3 * width * inner)
    ends = 2 * 2 * shape["vocab_size"] * width
    return int(min(shape["num_hidden_layers"], (MORE * memory - ends) // each))


def write_weights(folder: Path, held: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Files of random weights, one for what is beside the layers and one for each layer, all of which have the same."""
    torch.manual_seed(0)
    layers = sum(name.endswith("down_proj.weight") for name in held)
    drawn: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
    files: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in held.items():
        at = name.split(".layers.")
        number, _, leaf = at[1].partition(".") if len(at) == 2 else ("ends", "", name)
        if (leaf, tuple(tensor.shape)) not in drawn:
            made = torch.ones(tensor.shape) if tensor.ndim == 1 else None
            if made is None:
                made = torch.randn(tensor.shape, device=device, dtype=torch.bfloat16).mul_(spread(name, layers))
            drawn[leaf, tuple(tensor.shape)] = made.bfloat16().cpu().view(torch.int16).numpy()
        files.setdefault(f"model-{number}.safetensors", {})[name] = drawn[leaf, tuple(tensor.shape)]
    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(_write, folder / file, own) for file, own in files.items()]:
            done.result()
    free_memory(device)
    index = {"metadata": {}, "weight_map": {name: file for file, own in files.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """A file of safetensors with bfloat16 numbers, from memory that many files share."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, array in arrays.items():
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [start, start + array.nbytes]}
        start += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb", buffering=0) as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            rest: Any = array.reshape(-1).view(np.uint8)
            while len(rest):
                rest = rest[opened.write(rest) :]


# --- the command -------------------------------------------------------------------------------------------------------


def resumed(folder: Path, parallel: Row, size: int, after: Row) -> Row:
    """A run that is killed when it has saved a step, gone on with on half of the processes: the seconds of both parts and the
    largest relative difference of a loss to the run without a kill, which `sharded` has left; where that was measured by an
    earlier benchmark, it is run once more before. after: the layout of what goes on on several processes."""
    out, spared = folder / "resumed", size // 2
    if not losses(folder / "sharded"):
        launched(folder, "sharded", WAYS["sharded"], size)
    start = time.perf_counter()
    kill = lambda: any(out.glob("*/checkpoint-*"))  # noqa: E731
    launched(folder, out.name, parallel, size, "--set", "save_every=1", kill=kill)
    row: Row = {"killed_s": time.perf_counter() - start, "steps_before": len(losses(out)), "resumed_on": spared}
    more = after if spared > 1 else {}
    start = time.perf_counter()
    code, said, row["host_gib"] = launched(folder, out.name, more, spared, "--set", "save_every=1", "--resume")
    row["resumed_s"] = time.perf_counter() - start
    if code:
        return row | {"failed": {"packlora": words_of_error(said)}}
    ours, whole = losses(out), losses(folder / "sharded")
    if ours.keys() != whole.keys():
        return row | {"failed": {"packlora": f"steps {sorted(ours)} beside {sorted(whole)} of the run without a kill"}}
    return row | {"loss_difference": max(abs(ours[key] - loss) / loss for key, loss in whole.items()), "failed": {}}


def words_of_error(said: str) -> str:
    """The line with the error of packlora, before what torchrun says of it; else the last ones."""
    found = [line for line in said.splitlines() if line.startswith("error:") or "Error: " in line]
    return found[0][:600] if found else said[-400:]


def losses(out: Path) -> dict[tuple[str, int], float]:
    """Losses by job and step of a run's folder."""
    if not (out / "metrics.jsonl").exists():
        return {}
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return {(line["job"], line["step"]): line["loss"] for line in found}


def launched(
    folder: Path, out: str, parallel: Row, size: int, *more: str, kill: Callable[[], bool] | None = None
) -> tuple[int, str, float]:
    """`packlora train` on so many GPUs, which says here what it says: its exit code, all of that, and the most memory of the
    host that a process had at a time, in GiB, without files that it has mapped. kill: all processes are killed once this is
    true."""
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "-m", "packlora",
        "train", "run.yaml", "--set", f"output_dir={out}", *more,
    ]  # fmt: skip
    words += [word for key, value in parallel.items() for word in ("--set", f"parallel.{key}={str(value).lower()}")]
    process = subprocess.Popen(
        words, cwd=folder, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )  # fmt: skip
    began = time.monotonic()
    watch = Watch(process.pid, lambda: (kill is not None and kill()) or time.monotonic() - began > LIMIT)
    said: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            print(f"{time.monotonic() - began:7.1f} s {out}: {line}", end="", flush=True)
        process.wait()
    finally:
        watch.end()
    return process.returncode, "".join(said), watch.most / 2**30


def summary(rows: list[Row]) -> Row:
    """Figures by layout."""
    keys = (
        "before_training_s", "tokens_per_s", "gib", "host_gib", "resumed_s", "loss_difference", "start_s", "restart_s",
        "resumed_tokens_per_s", "loss_change",
    )  # fmt: skip
    return {f"{row['case']}_{key}": row[key] for row in rows for key in keys if key in row}


LARGE = Benchmark(
    cases, measure, summary,
    f"`torchrun --nproc-per-node N -m packlora train run.yaml` on all GPUs of a host: layers of {SHAPE}'s shape with its "
    f"vocabulary, as many as --layers says or as have {MORE} times the bytes of a GPU's memory in bfloat16, from "
    "safetensors files in the "
    "memory of the host; random weights, the same in all layers. Two LoRA jobs (ranks "
    f"{', '.join(map(str, RANKS))}) on all linear layers, {STEPS} steps of {BATCH} samples of {LENGTH} tokens each, "
    f"gradient_checkpointing, microbatches of {4 * LENGTH} tokens a process. sharded: parallel.shard_base; offloaded: and "
    "offload_base; stages: a pipeline of as many stages as there are GPUs. before_training_s: from the start of torchrun "
    "to the first microbatch: loading, the proof of packing, compiling; first_step_s: from there to the last of the "
    "jobs' first steps; tokens_per_s: of later steps, of all GPUs together; gib: peak of the GPU that needs the most; "
    "host_gib: most memory of a process at a time that is no mapped file and not pinned. resumed: the sharded run with "
    "save_every 1, all its processes killed (SIGKILL) when a checkpoint is there, gone on with on half of the GPUs with "
    "offload_base where they do not hold the weights; loss_difference: largest relative difference of a loss to that of the "
    "run without a kill. served: "
    "`packlora serve --set parallel.tensor=N` of the same files by torchrun, with gradient_checkpointing and the same "
    "microbatches; a model (rank 16, all linear layers, learning rate 1e-3) takes 4 steps of the same 8 samples; another of "
    "the same seed takes 2, and once the third is promised all processes are killed; the service goes on from its state "
    "folder with half of the processes (all, where half of the GPUs do not hold the weights), does the third step and the "
    "client a fourth. start_s, restart_s: until it answers; tokens_per_s: of the first model's later steps, "
    "resumed_tokens_per_s: of the fourth step after the kill; loss_difference: to the losses of the first model; "
    "loss_change: of the first model's losses by its steps.",
    ["packlora"], by_case=True, where="any",
)  # fmt: skip
