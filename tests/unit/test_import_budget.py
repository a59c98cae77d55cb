"""How much of packlora a run of one LoRA job and an accelerated step load, and that neither loads a plug-in; that all but what
needs an optional package works without it, and a run without what Windows lacks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import rows_into
from test_how_to import shown
from test_training import config, same_bits, steps, train
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
LINES_OF_TRAIN, LINES_OF_ACCELERATE = 25_550, 7_850
"""Most lines of packlora, comments and docstrings included. Lower them with what goes; never raise them."""
DECLARES, LINES_OF_A_DECLARATION = re.compile(r"packlora\.(engine\.objectives|runtime\.placements)\.\w+"), 90
"""Folders that declare what a run file may say, of which one more changes no other file."""
COUNTED = ("distillation", "dpo", "grpo", "kto", "orpo", "sft")
"""Those that count among the lines of training; each further one counts by itself."""
TOO_MANY = "more lines are loaded than the budget: import what few runs need where a key asks for it, or shorten others"
PLUGINS = (
    "packlora.megatron", "packlora.tune", "packlora.commands", "packlora.export", "packlora.answers", "packlora.images",
    "packlora.codes", "packlora.fp8", "packlora.sweep", "packlora.rl", "packlora.api", "packlora.serve", "packlora.pipeline",
    "packlora.experts",
)  # fmt: skip
OF_LAYOUTS = (
    "packlora.adapters.sharded", "packlora.adapters.moving_rows", "packlora.adapters.recorded_groups",
    "packlora.ops.lora_linear.moving", "packlora.ops.cross_entropy.parts",
)  # fmt: skip
"""Modules of slices of layers and of the vocabulary, and of segments that move: one job on one device without graphs has no use
for them."""
OF_FEATURES = (
    "packlora.adapters.norms", "packlora.ops.row_norm", "packlora.adapters.kept_outputs", "packlora.adapters.routed",
    "packlora.adapters.expert_targets", "packlora.adapters.other_modules", "packlora.adapters.names",
    "packlora.adapters.reading", "packlora.runtime.resume", "packlora.data.spans", "packlora.data.bounded",
    "packlora.data.mixture", "packlora.modality", "packlora.ops.lora_linear.layer_scales", "packlora.ops.lora_linear.composed",
    "packlora.ops.cross_entropy.chunked", "packlora.ops.cross_entropy.smoothing", "packlora.engine.objectives.neftune",
    "packlora.engine.objectives.smoothing",
)  # fmt: skip
"""Modules of what a run file asks for, which a job of LoRA on texts without more keys has no use for."""
OF_JOBS = ("packlora.adapters.linear", "packlora.adapters.weights", "packlora.adapters.attach", "packlora.config")
"""Modules of layers that jobs train, which a model of PEFT has no use for."""
WARMED = """
import json, os, sys

for name in (
    "bitsandbytes", "torchao", "compressed_tensors", "gptqmodel", "liger_kernel", "optuna", "tensorboard", "trackio", "wandb",
    "mlflow", "datasets", "megatron",
):
    sys.modules[name] = None  # as if it was not installed

import pathlib, torch, peft, tokenizers, transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

def count(code, out):
    exec(code, {})
    loaded = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "packlora"}
    lines = {name: sum(1 for _ in open(path)) for name, path in loaded.items() if path}
    pathlib.Path(out).write_text(json.dumps(lines))

assert not any(name.partition(".")[0] == "packlora" for name in sys.modules)
for code, out in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        try:
            count(code, out)
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    os.waitpid(child, 0)
"""
"""Count, in a fork for each code, the lines of each module of packlora that it loads; other libraries are there before, and
optional packages are not."""
MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, eos_token_id=1))
"""
TRAIN = f"""{MODEL}
import json, pathlib
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
folder = pathlib.Path("FOLDER")
model.save_pretrained(folder / "base")
words = {{word: number for number, word in enumerate(["<unk>", "</s>", *"abcdefgh"])}}
inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>").save_pretrained(folder / "base")
(folder / "rows.jsonl").write_text('{{"text": "a b c d"}}\\n{{"text": "e f g"}}\\n')
import packlora
result = packlora.train({{
    "base_model": str(folder / "base"), "output_dir": str(folder / "out"), "device": "cpu",
    "jobs": [{{"name": "a", "data": {{"path": str(folder / "rows.jsonl")}}, "adapter": {{"r": 2}},
              "train": {{"global_batch_size": 1}}}}],
}})
assert (folder / "out" / "a" / "adapter_model.safetensors").exists()
"""
ACCELERATE = f"""{MODEL}
from peft import LoraConfig, get_peft_model
import packlora
model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
packlora.accelerate(model)
tokens = torch.arange(8)[None]
model(input_ids=tokens, labels=tokens).loss.backward()
torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]).step()
"""
OBJECTIVE = """
import importlib.util, sys
spec = importlib.util.find_spec("packlora.engine.objectives")
sys.modules[spec.name] = package = importlib.util.module_from_spec(spec)
package.__path__.append("FOLDER/objectives")
spec.loader.exec_module(package)
from packlora.config import TrainConfig
from packlora.commands.schema import run_file_schema
assert "torch" not in vars(sys.modules["packlora.engine.objectives.focal"])
train = run_file_schema()["$defs"]["TrainConfig"]["properties"]
assert "focal" in str(train["trainer"]) and "power of 1 - p" in train["focal_gamma"]["description"]
assert TrainConfig(trainer="focal").learning_rate == TrainConfig(loss_type="focal").learning_rate == 2e-4
assert TrainConfig(trainer="focal", load_best_model_at_end=True, eval_steps=1, metric_for_best_model="eval_mean_p")
from packlora.sweep.config import SweepConfig
assert SweepConfig(job="a", parameters={"train.focal_gamma": [1.0, 2.0]}, metric="eval_mean_p")
for keys, said in (
    ({"focal_gamma": 1.0}, "focal_gamma is for trainer focal; this job's trainer is sft"),
    ({"trainer": "focal", "focal_gamma": 11.0}, "less than or equal to 10"),
    ({"trainer": "focal", "beta": 0.1}, "this job's trainer is focal"),
):
    try:
        raise AssertionError(TrainConfig(**keys))
    except ValueError as error:
        assert said in str(error), error
""" + TRAIN.replace(
    '"global_batch_size": 1', '"global_batch_size": 2, "loss_type": "focal", "focal_gamma": 3.0'
).replace('"device": "cpu"', '"device": "cpu", "dtype": "float64"')
"""A run with an objective that is in a folder of its own."""
PLACEMENT = """
import importlib.util, os, sys
spec = importlib.util.find_spec("packlora.runtime.placements")
sys.modules[spec.name] = package = importlib.util.module_from_spec(spec)
package.__path__.append("FOLDER/own/placements")
spec.loader.exec_module(package)
assert not [name for name in sys.modules if name.startswith("packlora.runtime.") and name.count(".") < 3 and name != spec.name]
from packlora import InputError, ProcessError, train
from packlora.config import ParallelConfig
for keys, processes, said in (
    ({"mirror": 2}, 3, "parallel.mirror is 2, but 3 processes were started"),
    ({"mirror": 2, "tensor": 2}, 4, "mirror is 2 and tensor is set too"),
    ({"mirror": 2, "devices_per_job": 3}, 6, "2 devices hold the base model together (mirror)"),
):
    try:
        raise AssertionError(ParallelConfig(**keys).check(processes))
    except (InputError, ValueError) as error:
        assert said in str(error), error
ended, end = os.pipe()
child = os.fork()
os.environ |= {"RANK": "0" if child else "1", "LOCAL_RANK": "0" if child else "1", "WORLD_SIZE": "2"}
try:
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method="file://FOLDER/own/store", rank=0 if child else 1, world_size=2)
    run = {
        "base_model": "FOLDER/base", "device": "cpu", "parallel": {"mirror": 2},
        "jobs": [{"name": "a", "data": {"path": "FOLDER/rows.jsonl"}, "adapter": {"r": 2}, "train": {"global_batch_size": 1}}],
    }
    assert train({**run, "output_dir": "FOLDER/mirrored"}).status == "done"
    from packlora.runtime.placement import Placement
    from packlora.runtime.placements.mirror.placement import PLACEMENT
    def refuse(prepared, skeleton):
        raise InputError("not this model")
    check, PLACEMENT.check = PLACEMENT.__dict__.get("check"), refuse
    try:
        raise AssertionError(train({**run, "output_dir": "FOLDER/refused"}))
    except InputError as error:
        assert "not this model" in str(error), error
    if check is None:
        del PLACEMENT.check
    else:
        PLACEMENT.check = check
    load = Placement.load
    def wrong(placement):
        base = load(placement)
        next(base.model.parameters()).data.mul_(1 if child else 1.001)
        return base
    Placement.load = wrong
    try:
        raise AssertionError(train({**run, "output_dir": "FOLDER/wrong"}))
    except ProcessError as error:
        assert "found other numbers for the same step" in str(error), error
except BaseException:
    import traceback
    traceback.print_exc()
    os._exit(1)
if not child:
    os.close(end)
    os.read(ended, 1)  # process 0 is done with what this one has sent
    os._exit(0)
os.close(end)
assert os.waitpid(child, 0)[1] == 0
"""
"""A run on two processes with a placement that is in a folder of its own."""
EVERYTHING = """
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
"""
WITHOUT_TRITON = """
import importlib, pkgutil, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
    del sys.modules[name]
sys.modules["triton"] = None
import packlora
for module in pkgutil.walk_packages(packlora.__path__, "packlora."):
    if not module.name.endswith("__main__") and "megatron" not in module.name:
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            assert "triton" in str(error), (module.name, error)
"""
WITHOUT_POSIX = """
import os, sys
sys.path[:0] = ["ROOT", "ROOT/tests"]
os.environ["PACKLORA_CACHE"] = "FOLDER/cache"
os.chdir("FOLDER")
sys.argv = ["without_posix.py", "FOLDER/run.yaml", "FOLDER"]
import without_posix
without_posix.main()
"""
KERNELS = re.compile(
    r"packlora\.(ops\..*|codes\.(four_bit|kernel)|fp8\.(change_kernels|change_launches|kernel|launches))"
)
"""Modules that need Triton; all others reach them where a GPU has it."""


@pytest.fixture(scope="module")
def small(tiny_base: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run file of two steps, written to the folder of its output folder."""
    folder = tmp_path_factory.mktemp("small")
    job = {"name": "a", "adapter": {"r": 2}, "train": {"global_batch_size": 4, "max_steps": 2}}
    tree = config(tiny_base(), folder / "there", rows_into(folder), [job], save_every=1)
    (folder / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what the forks write."""
    return tmp_path_factory.mktemp("loaded")


@pytest.fixture(scope="module")
def loaded(small: dict[str, Any], folder: Path) -> dict[str, dict[str, int]]:
    """Lines of each module of packlora that a run, an accelerated step and all imports have loaded when they are done."""
    codes = {"train": TRAIN.replace("FOLDER", str(folder)), "accelerate": ACCELERATE, "everything": EVERYTHING}
    codes["without triton"], codes["objective"] = WITHOUT_TRITON, OBJECTIVE.replace("FOLDER", str(folder / "own"))
    codes["placement"] = PLACEMENT.replace("FOLDER", str(folder))
    for page, blocks in ("add-an-objective.md", (1, 2)), ("add-a-placement.md", (0, 1)):
        for name, code in (shown(page, block) for block in blocks):
            file = folder / "own" / Path(*Path(name).parts[-3:])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(code)
    codes["without posix"] = WITHOUT_POSIX.replace("ROOT", str(ROOT)).replace(
        "FOLDER", str(Path(small["output_dir"]).parent)
    )
    asked = json.dumps([(code, str(folder / f"{name}.json")) for name, code in codes.items()])
    done = subprocess.run([sys.executable, "-c", WARMED], cwd=ROOT, input=asked, capture_output=True, text=True)
    files = {name: folder / f"{name}.json" for name in codes}
    assert done.returncode == 0 and all(file.exists() for file in files.values()), done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return {name: json.loads(file.read_text()) for name, file in files.items()}


def test_a_run_of_one_job_loads_no_more_than_its_budget_and_no_plug_in(loaded: dict[str, dict[str, int]]) -> None:
    lines = loaded["train"]
    folders = [name for name in lines if DECLARES.fullmatch(name) and ROOT.joinpath(*name.split(".")).is_dir()]
    assert (
        "packlora.engine.objectives.dpo" in folders and max(lines[name] for name in folders) <= LINES_OF_A_DECLARATION
    )
    counted = [n for name, n in lines.items() if name not in folders or name.rpartition(".")[2] in COUNTED]
    assert "packlora.adapters.linear" in lines and sum(counted) <= LINES_OF_TRAIN, TOO_MANY
    assert not [name for name in lines if name.startswith((*PLUGINS, *OF_LAYOUTS, *OF_FEATURES))]


def test_an_accelerated_step_loads_no_more_than_its_budget_and_no_plug_in(loaded: dict[str, dict[str, int]]) -> None:
    lines = loaded["accelerate"]
    assert "packlora.live.layers" in lines and sum(lines.values()) <= LINES_OF_ACCELERATE, TOO_MANY
    assert not [name for name in lines if name.startswith((*PLUGINS, *OF_LAYOUTS, *OF_JOBS))]


def test_the_built_in_objective_of_the_page_is_its_folder_alone(
    loaded: dict[str, dict[str, int]], folder: Path
) -> None:
    """Its key, its learning rate and its metric are taken, other keys refused, and its loss is the formula on transformers'
    numbers."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "own" / "base", dtype=torch.float64)
    found = []
    for ids in ([2, 3, 4, 5, 1], [6, 7, 8, 1]):
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        found.append(torch.log_softmax(logits, 1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])])
    logp = torch.cat(found).detach()
    (step,) = steps(folder / "own" / "out")
    assert step["loss"] == pytest.approx(float((-((1 - logp.exp()) ** 3) * logp).mean()), rel=1e-10)
    assert step["mean_p"] == pytest.approx(float(logp.exp().mean()), rel=1e-10)
    assert "packlora.engine.objectives.focal.loss" in loaded["objective"]


def test_the_placement_of_the_page_is_its_folder_alone(loaded: dict[str, dict[str, int]], folder: Path) -> None:
    """Two processes that compute the same give the bits of one. A process that computes other numbers ends the run, and numbers
    of processes are refused by the key."""
    assert "packlora.runtime.placements.mirror.placement" in loaded["placement"]
    record = json.loads((folder / "mirrored" / "run.json").read_text(encoding="utf-8"))
    assert record["schedule"]["layout"]["own"] == ["mirror", 2]
    same_bits(folder / "mirrored", folder / "out", [{"name": "a"}])


def test_modules_import_and_accelerate_and_doctor_work_without_optional_packages(
    loaded: dict[str, dict[str, int]],
) -> None:
    """Without a warning of ours."""
    assert set(PLUGINS) < set(loaded["everything"]) | {"packlora.megatron"}


def test_nothing_but_kernels_needs_triton(loaded: dict[str, dict[str, int]]) -> None:
    """It is not there on a Mac and on Windows, nor beside torch's builds for CPUs."""
    missing = loaded["everything"].keys() - loaded["without triton"].keys()
    assert missing and [name for name in missing if not KERNELS.fullmatch(name)] == []


def test_a_run_trains_and_resumes_without_what_windows_lacks(
    loaded: dict[str, dict[str, int]], small: dict[str, Any]
) -> None:
    """Help, plan, a run that is ended after a step, and the rest of it; with the bits of a run here."""
    there, here = (Path(small["output_dir"]).with_name(name) for name in ("there", "here"))
    train({**small, "output_dir": str(here)})
    same_bits(here, there, small["jobs"])
    assert not [*there.rglob(".tmp-*")], "folders that were to be removed"
    assert json.loads((there / "run.json").read_text(encoding="utf-8"))["result"]["status"] == "done"
