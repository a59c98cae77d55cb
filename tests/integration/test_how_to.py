"""The pages on how to add something: the code that they show works, put where they say and nowhere else. Folders that a page
adds are in tests/unit/test_import_budget.py."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from packed import parts
from peft import LoraConfig
from safetensors.torch import load_file
from test_any_module import Beside
from test_training import steps, train
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from packlora.adapters import kinds
from packlora.adapters.files import save_adapter
from packlora.adapters.kinds.embedding import Weights
from packlora.adapters.spec import ModuleSpec, resolve
from packlora.adapters.weights import low_rank_shapes
from packlora.cli import app
from packlora.commands.adapter_folder import AdapterFolder
from packlora.commands.held_out import evaluate_adapter
from packlora.data.readers import read_data
from packlora.engine.passes import run_microbatch
from packlora.errors import InputError
from packlora.events import Evaluated, Stop
from packlora.export import export
from packlora.run_file import load_run

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
Show = Callable[[str], Path]


def shown(page: str, block: int = 0) -> tuple[str, str]:
    """File that a block of code of a page is for, and the code."""
    code = re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE)[block]
    return code.split("\n")[0].removeprefix("# "), code


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Show]:
    """Write the module that a page shows where its folder finds it, for one test."""
    added: list[str] = []

    def write(page: str) -> Path:
        name, code = shown(page)
        package = importlib.import_module(name.rpartition("/")[0].replace("/", "."))
        (tmp_path / "added").mkdir()
        file = tmp_path / "added" / name.rpartition("/")[2]
        file.write_text(code)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(file.parent)])
        added.append(f"{package.__name__}.{file.stem}")
        return file

    yield write
    for name in added:
        parent, _, leaf = name.rpartition(".")
        sys.modules.pop(name, None)
        vars(sys.modules[parent]).pop(leaf, None)


def test_the_format_of_the_page_is_read_by_its_ending(put: Show, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.tsv", tmp_path / "bad.tsv"
    good.write_text("\ufeffone and one\ttwo\nthree less one\ttwo\n", encoding="utf-8")
    bad.write_text("one and one\ttwo\nthree less one\n")
    other = tmp_path / "rows.odd"
    other.write_text("one\n")
    with pytest.raises(InputError, match=r"ends in '\.tsv'; accepted are (?!.*tsv)"):
        read_data(str(good), "a")
    put("add-a-data-format.md")
    with pytest.raises(InputError, match=r"ends in '\.odd'; accepted are .*\.jsonl.*\.tsv"):
        read_data(str(other), "a")
    with pytest.raises(InputError, match=r"good\.tsv is a data file, and this takes a run file"):
        load_run(good)
    rows = read_data(str(good), "a").rows
    assert [(row.prompt, row.completion) for row in rows] == [("one and one", "two"), ("three less one", "two")]
    assert rows[1].where == f"{good}, line 2"
    with pytest.raises(InputError, match=r"bad\.tsv, line 2: 1 columns; there must be two"):
        read_data(str(bad), "a")
    read = read_data(str(bad), "a", on_bad_row="skip")
    assert len(read.rows) == len(read.skipped) == 1


def test_the_command_of_the_page_is_called_and_listed_by_its_name(put: Show, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a b c"}\n{"text": "a"}\n')
    assert CliRunner().invoke(app, ["count", str(data)]).exit_code == 2
    put("add-a-command.md")
    done = CliRunner().invoke(app, ["count", str(data), "--least", "2"])
    assert done.exit_code == 0 and done.output == "1 rows\n", done.output
    assert "Count the rows of a data file." in CliRunner().invoke(app, ["--help"]).output
    missing = CliRunner().invoke(app, ["count", str(tmp_path / "no.jsonl")])
    assert missing.exit_code == 2 and "does not exist" in missing.output


class BlockLinear(torch.nn.Module):
    """Two blocks on a diagonal."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.blocks = torch.nn.Parameter(torch.stack([linear.weight[: len(linear.weight) // 2, ::2] for _ in "12"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = x.unflatten(-1, (2, -1))
        return torch.einsum("...hk,hnk->...hn", halves, self.blocks).flatten(-2)


class InPlainTorch(torch.nn.Module):
    """y + s B A x in plain torch."""

    def __init__(self, base: torch.nn.Module, A: torch.Tensor, B: torch.Tensor, scaling: float) -> None:
        super().__init__()
        self.base, self.scaling = base, scaling
        self.A, self.B = (torch.nn.Parameter(factor.detach().clone()) for factor in (A, B))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scaling * (x @ self.A.T @ self.B.T)


def blocked() -> Any:
    model = tiny_model("llama", torch.float64)
    for layer in model.model.layers:
        layer.mlp.up_proj = BlockLinear(layer.mlp.up_proj)
    return model


def test_the_kind_of_layer_of_the_page_learns_beside_a_job_of_another_kind(put: Show, tmp_path: Path) -> None:
    """Loss and gradients are those of the formula in plain torch; what the kind does not do is refused."""
    own, other = {"target_modules": ["up_proj"]}, {"target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.3}
    with pytest.raises(InputError, match=r"matches model\.layers\.0\.mlp\.up_proj, of type BlockLinear"):
        resolve(LoraConfig(r=3, task_type="CAUSAL_LM", **own), blocked(), "a")
    put("add-a-layer-kind.md")
    for key, value in ("lora_dropout", 0.1), ("use_dora", True), ("bias", "lora_only"):
        model, keys = blocked(), {"r": 3, "task_type": "CAUSAL_LM", key: value, **own}
        for layer in model.model.layers:
            layer.mlp.up_proj.bias = torch.nn.Parameter(torch.zeros(layer.mlp.up_proj.out_features))
        with pytest.raises(
            InputError, match="BlockLinear, which takes lora_dropout: 0, use_dora: false and bias: none alone"
        ):
            resolve(LoraConfig(**keys), model, "a")
    jobs = Beside(blocked, {"own": own, "other": other}, fused=True)
    weight, adapter = 0.2, jobs.adapters[0]
    result = run_microbatch(jobs.device, parts(jobs.samples, np.array([weight, 0.3])))
    model, learnt = blocked(), adapter.named_parameters()
    model.set_attn_implementation("sdpa")  # the other one computes in float32
    for number, layer in enumerate(model.model.layers):
        A, B = (learnt[f"model.layers.{number}.mlp.up_proj/{name}"] for name in "AB")
        layer.mlp.up_proj = InPlainTorch(layer.mlp.up_proj, A, B, 5 / 3)
    loss, _ = jobs.gradients(adapter, model, weight)
    assert float(result.sums[adapter.number]) == pytest.approx(loss, rel=1e-10)
    for number, layer in enumerate(model.model.layers):
        for name in "AB":
            grad, found = (
                getattr(layer.mlp.up_proj, name).grad,
                learnt[f"model.layers.{number}.mlp.up_proj/{name}"].grad,
            )
            assert float(grad.abs().max()) > 0 and torch.allclose(found, grad, rtol=1e-9, atol=1e-12)
    save_adapter(tmp_path / "saved", adapter)
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert sorted(saved)[0] == "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    opened = AdapterFolder(tmp_path, LoraConfig(), "base", blocked(), None, jobs.specs["own"], saved, None)
    with pytest.raises(
        InputError, match=r"adapts .*up_proj, .* which vLLM does not read; nor can it be merged: .* no place"
    ):
        export._check_plain(opened, "vLLM")


class Rows(torch.nn.Module):
    """An embedding of a class of its own."""

    def __init__(self, embedding: torch.nn.Embedding) -> None:
        super().__init__()
        self.weight, self.padding_idx = embedding.weight, embedding.padding_idx

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]


class RowsWeights(Weights):
    @classmethod
    def takes(cls, module: torch.nn.Module) -> bool:
        return isinstance(module, Rows)

    @classmethod
    def shapes(cls, spec: ModuleSpec, base: Any) -> dict[str, tuple[int, ...]]:
        return low_rank_shapes(spec, *reversed(base.weight.shape))


def test_a_kind_may_be_of_an_embedding_of_any_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the bits of the kind of torch's, which PEFT has too."""
    rows, found = f"{kinds.__name__}.rows", list[Any]()
    monkeypatch.setitem(sys.modules, rows, SimpleNamespace(Weights=RowsWeights))
    monkeypatch.setattr(kinds, "every_kind", lambda: ["embedding", "rows"])

    def own_class() -> Any:
        model = tiny_model("llama", torch.float64)
        model.model.embed_tokens = Rows(model.model.embed_tokens)
        return model

    for make in (lambda: tiny_model("llama", torch.float64), own_class):
        torch.manual_seed(0)
        jobs = Beside(
            make, {"a": {"target_modules": ["embed_tokens"]}, "b": {"target_modules": ["q_proj"]}}, fused=True
        )
        sums = run_microbatch(jobs.device, parts(jobs.samples, np.array([0.2, 0.3]))).sums
        (A, B) = (jobs.adapters[0].named_parameters()[f"model.embed_tokens/{name}"] for name in "AB")
        found.append((jobs.specs["a"].modules["model.embed_tokens"].kind, sums, A.grad, B.grad))
    (one, sums, *grads), (other, sums_of_own, *grads_of_own) = found
    assert (one, other) == ("embedding", "rows") and sums == sums_of_own
    assert all(map(torch.equal, grads, grads_of_own))


def test_the_objective_of_the_page_is_the_focal_loss(tiny_base: Callable[..., str], tmp_path: Path) -> None:
    """Loss and metric of the first step are the formula on transformers' log-probabilities."""
    name, code = shown("add-an-objective.md")
    (tmp_path / name).write_text(code)
    base, samples = tiny_base("llama"), [[5, 9, 6, 12, 7], [11, 8, 5, 14, 13, 6, 9]]
    lines = [{"input_ids": ids, "labels": [-100, -100, *ids[2:]]} for ids in samples]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    keys = {"global_batch_size": 2, "max_steps": 1, "objective": f"{tmp_path / name}:loss"}
    job = {"name": "a", "data": {"path": str(tmp_path / "rows.jsonl")}, "adapter": {"r": 2}, "train": keys}
    out = tmp_path / "out"
    common = {"base_model": base, "output_dir": str(out), "device": "cpu", "dtype": "float64"}
    train(common | {"jobs": [job]})
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    found = []
    for ids in samples:
        logits = model(input_ids=torch.tensor([ids])).logits[0, 1:-1]
        found.append(torch.log_softmax(logits, 1)[torch.arange(len(ids) - 2), torch.tensor(ids[2:])])
    logp = torch.cat(found).detach()
    (step,) = steps(out)
    assert step["loss"] == pytest.approx(float((-((1 - logp.exp()) ** 2) * logp).mean()), rel=1e-10)
    assert step["objective/p"] == pytest.approx(float(logp.exp().sum()) / 2, rel=1e-10)
    notes = evaluate_adapter(out / "a", str(tmp_path / "rows.jsonl"), device="cpu").notes
    assert any(text.endswith(f"was trained with the loss of {keys['objective']}") for text in notes), notes


def test_the_subscribers_of_the_page_hear_a_run(
    tiny_base: Callable[..., str], write_rows: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one ends a job whose held-out loss stays high. The second one writes the losses of all steps, and ends a job
    whose held-out loss has risen twice."""
    monkeypatch.chdir(tmp_path)
    job = {"name": "a", "data": {"path": write_rows("a", 4)}, "adapter": {"r": 2}, "train": {"max_steps": 2}}
    run = {"base_model": tiny_base("shallow"), "output_dir": "out", "device": "cpu", "jobs": [job]}
    Path("run.yaml").write_text(json.dumps(run))
    page, found = "add-an-event-subscriber.md", dict[str, Any]()
    exec(shown(page)[1], found)  # trains
    assert [step["loss"] for step in steps(tmp_path / "out")] and found["watch"](Evaluated("a", 201, 3.1)).job == "a"
    exec(shown(page, 1)[1], found)
    patience = found["Patience"]()
    again = train({**run, "output_dir": "again"}, subscribers=[patience])
    assert again.status == "done"
    written = [float(line.split(",")[2]) for line in Path("losses.csv").read_text().splitlines()]
    assert written == pytest.approx([step["loss"] for step in steps(tmp_path / "again")])
    ends = [patience(Evaluated("b", step, loss)) for step, loss in enumerate((2.0, 3.0, 2.5, 2.6))]
    assert ends == [None, None, None, Stop("b", "its held-out loss rose twice")]
