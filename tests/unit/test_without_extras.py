"""Everything but what needs an optional package works without it, and is imported without a warning of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import sys

for name in (
    "bitsandbytes", "torchao", "compressed_tensors", "gptqmodel", "liger_kernel", "optuna", "tensorboard", "trackio", "wandb",
    "mlflow", "datasets", "megatron",
):
    sys.modules[name] = None  # as if it was not installed

import importlib, pkgutil, warnings
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import packlora

    for module in pkgutil.walk_packages(packlora.__path__, "packlora."):
        if not module.name.endswith("__main__") and "megatron" not in module.name:
            importlib.import_module(module.name)
    for name in packlora.__all__:
        getattr(packlora, name)
# one that Python blames on another library's file is that library's
ours = [str(warning.message) for warning in caught if warning.filename.startswith(packlora.__path__[0])]
assert not ours, ours

sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
for dora in (False, True):
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", use_dora=dora))
    report = packlora.accelerate(model)
    assert report.accelerated == len(report.modules) == 7, report
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()

from typer.testing import CliRunner
from packlora.cli import app

said = CliRunner().invoke(app, ["doctor"])
assert said.exit_code == 0 and "bitsandbytes" in said.output, said.output
print("done")
"""


def test_modules_import_and_accelerate_and_doctor_work_without_optional_packages() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr
