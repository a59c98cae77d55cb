"""Runs of fit.py: models with random weights that are made on the device, packlora's and PEFT's training, peaks of memory."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

import packlora
from benchmarks.commands import WORDS, write_tokenizer
from benchmarks.harness import Case, Options, Row
from benchmarks.shapes import TARGETS, build, build_layers, config_of, use_liger
from benchmarks.trainer import Ends
from packlora.codes.load import codes_made_of
from packlora.codes.weight import QuantizedLinear
from packlora.config import QuantizationConfig, Run
from packlora.engine.allocator import grow_segments
from packlora.engine.memory import free_memory
from packlora.run_file import run_from

GIB = 2**30
NF4 = QuantizationConfig(method="nf4", double_quant=True)
FORMS: dict[str, QuantizationConfig | None] = {"bf16": None, "nf4": NF4}
LENGTH, BATCH, RANK = 2048, 2, 16
"""Tokens of a sample; samples of an optimizer step."""
STEPS, WARM = 5, 2
"""Optimizer steps of a run, and those at the start that are not counted."""
TOLD = ("CUDA graphs", "out of memory")
"""Words of what a run says that a row keeps."""


def length_of(options: Options) -> int:
    return 32 if options.tiny else LENGTH


def folder_of(one: Case, options: Options) -> Path:
    """Folder with the configuration, a tokenizer and samples of a shape, and no weights."""

    def make() -> Any:
        made = tempfile.TemporaryDirectory()
        folder = Path(made.name)
        write_tokenizer(folder / "base", 100 if options.tiny else WORDS)
        config = config_of(f"Qwen3-{one.shape}", options.tiny)
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(folder / "base")
        ids = np.random.default_rng(0).integers(3, 100, (BATCH * STEPS, length_of(options))).tolist()
        (folder / "rows.jsonl").write_text("".join(json.dumps({"input_ids": own, "labels": own}) + "\n" for own in ids))
        return made

    return Path(options.shared(one.shape, make).name)


def run_of(folder: Path, one: Case, options: Options, **keys: Any) -> Run:
    """A run of one LoRA job; keys: more of the run file's."""
    job = {
        "name": "a", "data": {"path": str(folder / "rows.jsonl")},
        "adapter": {"r": RANK, "lora_dropout": 0.0, "target_modules": TARGETS},
        "train": {"global_batch_size": BATCH, "max_steps": STEPS, "learning_rate": 1e-4},
    }  # fmt: skip
    form = FORMS[one.form]
    tree = {
        "base_model": str(folder / "base"), "output_dir": str(folder / "out"), "dtype": "bfloat16",
        "device": str(options.device), "jobs": [job], "save_every": 0,
    }  # fmt: skip
    return run_from(tree | ({} if form is None else {"quantization": form.model_dump()}) | keys)


@contextmanager
def random_weights(device: torch.device) -> Iterator[None]:
    """While it lasts, base models have the sizes that their folder says and random weights, made on the device."""

    def floats(path: str, *_: Any, **__: Any) -> Any:
        return build(read_sizes(path), device).eval()

    def codes(
        path: str, revision: Any, asked: QuantizationConfig, stored: Any, dtype: torch.dtype, *_: Any, **__: Any
    ) -> Any:
        return in_codes(read_sizes(path), asked, dtype, device)

    with (
        mock.patch("packlora.base.model.read_model", floats),
        mock.patch("packlora.codes.plugin.read_quantised", codes),
    ):
        yield


def in_codes(config: Any, asked: QuantizationConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """A model whose linear layers are this package's, in codes."""

    def layer(weight_NK: torch.Tensor) -> torch.nn.Module:
        return QuantizedLinear(codes_made_of(weight_NK, asked, dtype), None, dtype)

    return build_layers(config, device, layer)


def read_sizes(path: str) -> Any:
    return AutoConfig.from_pretrained(path, attn_implementation="sdpa")


def train(folder: Path, one: Case, options: Options, keys: Mapping[str, Any]) -> Row:
    """Train by packlora.train. Raises MemoryError."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    with random_weights(options.device):
        packlora.train(run_of(folder, one, options, **keys))
    record = json.loads((out / "run.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    ends = [line["elapsed"] for line in lines if line.get("loss") is not None]
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    said = [text for text in record["warnings"] if any(word in text for word in TOLD)]
    return {"ends": ends, "losses": losses, "taken": record["fit"], "notes": said}


def train_peft(folder: Path, one: Case, options: Options) -> Row:
    """The same samples by PEFT and SFTTrainer, or without TRL by transformers' Trainer."""
    by_trl = all(importlib.util.find_spec(name) is not None for name in ("trl", "datasets"))
    loss = "TRL's loss" if by_trl else use_liger(options.device)
    model = base_of_peft(folder, one, options)
    adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    arguments: Row = {
        "output_dir": str(folder / "trainer"), "per_device_train_batch_size": one.batch,
        "gradient_accumulation_steps": BATCH // one.batch, "gradient_checkpointing": one.checkpointing,
        "learning_rate": 1e-4, "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "bf16": options.device.type == "cuda", "use_cpu": options.device.type == "cpu",
    }  # fmt: skip
    ends = Ends()
    if not by_trl:
        args = TrainingArguments(
            **arguments, remove_unused_columns=False, gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        adapted = get_peft_model(model, adapter, autocast_adapter_dtype=True)
        adapted.enable_input_require_grads()
        how = Trainer(
            model=adapted, args=args, train_dataset=rows, data_collator=default_data_collator, callbacks=[ends]
        )
        said = f"Trainer of transformers {version('transformers')}"
    else:
        from datasets import Dataset
        from datasets.table import InMemoryTable

        trl: Any = importlib.import_module("trl")

        args = trl.SFTConfig(**arguments, max_length=length_of(options), dataset_kwargs={"skip_prepare_dataset": True})
        tokenizer = AutoTokenizer.from_pretrained(folder / "base")
        columns = {key: [row[key] for row in rows] for key in ("input_ids", "labels")}
        data = Dataset(
            InMemoryTable.from_pydict(columns), fingerprint="rows"
        )  # else it pickles all of pyarrow to make one
        how = trl.SFTTrainer(
            model=model,
            args=args,
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=adapter,
            callbacks=[ends],
        )
        said = f"SFTTrainer of TRL {version('trl')}"
    how.train()
    losses = [line["loss"] for line in how.state.log_history if "loss" in line]
    return {"ends": ends.times, "losses": losses, "by": f"{said}, PEFT {version('peft')}, {loss}"}


def base_of_peft(folder: Path, one: Case, options: Options) -> Any:
    """The base model for PEFT; linear layers in codes are bitsandbytes' own."""
    sizes = read_sizes(str(folder / "base"))
    if one.form == "bf16":
        model = build(sizes, options.device)
    else:
        from bitsandbytes.nn import Linear4bit, Params4bit

        def layer(weight_NK: torch.Tensor) -> Any:
            N, K = weight_NK.shape
            with torch.device("meta"):
                codes = Linear4bit(K, N, False, weight_NK.dtype, True, "nf4")
            codes.weight = Params4bit(weight_NK, quant_type="nf4", compress_statistics=True, module=codes).to(
                options.device
            )
            return codes

        model = build_layers(sizes, options.device, layer)
        model.is_loaded_in_4bit = True
    model.config.use_cache = False
    return model


def measured(options: Options, run: Any) -> Row:
    """Rate of a run and the peaks of its memory, all of it: reading, the proof of packing, training."""
    cuda = options.device.type == "cuda"
    if cuda:
        torch._C._cuda_clearCublasWorkspaces()  # which stay for each stream that a run had for its graphs
    grow_segments(False)  # torch's default; packlora.train has it otherwise
    free_memory(options.device)
    before = torch.cuda.memory_reserved(options.device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(options.device)
    start = time.perf_counter()
    try:
        done: Row = run()
    except (MemoryError, torch.OutOfMemoryError) as error:
        done = {"failed": {"memory": str(error).splitlines()[0]}}
    ends = done.pop("ends", [])
    took = [end - begin for begin, end in pairwise(ends)][WARM - 1 :]
    row: Row = {"tokens_per_s": None, "wall_s": time.perf_counter() - start, **done}
    if took:
        row["tokens_per_s"] = BATCH * length_of(options) / statistics.median(took)
    if cuda:
        stats = torch.cuda.memory_stats(options.device)
        row |= {
            "gib": torch.cuda.max_memory_reserved(options.device) / GIB,
            "allocated_gib": torch.cuda.max_memory_allocated(options.device) / GIB,
            "reserved_before_gib": before / GIB, "retries": stats.get("num_alloc_retries", 0),
        }  # fmt: skip
    return row
