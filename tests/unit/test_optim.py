"""train.optim: steps are those of what transformers takes for the name, to the bit, and go on from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig, get_peft_model
from test_flat import SHAPES, values

from packlora.adapters.attach import attach
from packlora.adapters.files import keyed
from packlora.adapters.flat import FlatLayout
from packlora.adapters.spec import resolve
from packlora.config import JobConfig, TrainConfig
from packlora.config.train import LACKED
from packlora.engine.library_optimizer import LibraryOptimizer
from packlora.engine.optimizer import FlatAdamW, check_optim, optimizer_of
from packlora.errors import InputError

SETTINGS = {"adam_beta1": 0.8, "adam_beta2": 0.97, "adam_epsilon": 1e-7, "weight_decay": 0.1, "learning_rate": 0.01}
SIZES = {**SHAPES, "wide/A": (9, 1000), "wide/B": (700, 9), "odd/A": (33, 131)}
"""With some of at least 4096 numbers, which is where bitsandbytes begins to keep 8 bits."""
COPIED = {"copy/weight": (13, 11), "copy/bias": (13,), "copy/norm": (64,), "rows/tokens": (3, 64)}
"""Of modules that a job has a copy of, and rows of tokens."""
OPTIMS = [
    "adamw_torch",
    "adamw_torch_fused",
    "adafactor",
    "sgd",
    "adamw_bnb_8bit",
    "adamw_8bit",
    "lion_32bit",
    "lion_8bit",
]


def theirs(optim: str, start: dict[str, torch.Tensor], ratio: float, folder: Path) -> tuple[Any, dict[str, Any]]:
    """What transformers' Trainer makes, over groups as PEFT's LoRA+ has them."""
    from transformers import Trainer, TrainingArguments

    keys = {key: value for key, value in SETTINGS.items() if key != "weight_decay"}
    chosen = TrainingArguments(str(folder), optim=optim, use_cpu=True, report_to=[], **keys)
    made, settings = Trainer.get_optimizer_cls_and_kwargs(chosen)
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    groups = [
        {
            "params": [p], "lr": settings["lr"] * (1.0 if name.endswith(("/A", "/weight", "/tokens")) else ratio),
            "weight_decay": 0.0 if name.endswith(("/bias", "/norm")) else SETTINGS["weight_decay"],
        }
        for name, p in parameters.items()
    ]  # fmt: skip
    more = {"foreach": False} if made in (torch.optim.AdamW, torch.optim.SGD) and not settings.get("fused") else {}
    return made(groups, **settings, **more), parameters


@pytest.mark.parametrize("optim", OPTIMS)
def test_steps_are_those_of_what_transformers_takes_for_the_name_to_the_bit(optim: str, tmp_path: Path) -> None:
    """With LoRA+, decay, biases, copies, and parameters without a gradient; broken off after two steps."""
    if "8bit" in optim or "lion" in optim:
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    sizes = SIZES | ({} if optim == "adamw_torch_fused" else COPIED)  # whose last bits go by where a parameter lies
    start = {name: torch.randn(shape) for name, shape in sizes.items()}
    layout = FlatLayout(sizes)
    flat = torch.zeros(layout.size)
    ours = layout.views(flat)
    for name, value in start.items():
        ours[name].copy_(value)
    known = {key: value for key, value in SETTINGS.items() if key not in LACKED.get(optim, ())}
    config = TrainConfig.model_validate(known | {"optim": optim, "loraplus_lr_ratio": 4.0})
    kind = FlatAdamW if optim.startswith("adamw_torch") else LibraryOptimizer
    optimizer: Any = kind(flat, layout, config)
    reference, parameters = theirs(optim, start, 4.0, tmp_path)
    for number in range(4):
        gradient = torch.zeros_like(flat)
        views, lacking = layout.views(gradient), {"v/A", "wide/A"} if number in (0, 2) else set()
        for name, parameter in parameters.items():
            value = torch.randn(parameter.shape)
            parameter.grad = None if name in lacking else value
            views[name].copy_(0 if name in lacking else value)
        reference.step()
        before = flat._version
        optimizer.ready(gradient, lacking, SETTINGS["learning_rate"])()
        assert flat._version > before
        if number == 1:
            state = {name: {k: v.clone() for k, v in own.items()} for name, own in optimizer.state().items()}
            assert state.keys() == sizes.keys()
            optimizer = kind(flat, layout, config)
            optimizer.load(state)
        for name, parameter in parameters.items():
            assert torch.equal(ours[name], parameter), (number, name)
    if "8bit" in optim:
        assert optimizer.state()["wide/B"]["state1"].dtype == torch.uint8
    used = torch.zeros_like(flat)
    for view in layout.views(used).values():
        view.fill_(1)
    assert (flat[used == 0] == 0).all()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("optim", [*OPTIMS[:1], *OPTIMS[2:]])
def test_steps_are_those_of_the_optimizer_that_transformers_makes_of_a_peft_model(optim: str, tmp_path: Path) -> None:
    """Its groups, and the copy of an embedding, of which it keeps 32 bits; another one afterwards is not touched by that."""
    if "8bit" in optim or "lion" in optim:
        pytest.importorskip("bitsandbytes")
    from transformers import Trainer, TrainingArguments

    lora = LoraConfig(
        r=80, use_dora=True, bias="lora_only", target_modules=["q_proj", "down_proj"], modules_to_save=["embed_tokens", "norm"],
        init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    known = {key: value for key, value in SETTINGS.items() if key not in LACKED.get(optim, ())}
    arguments = TrainingArguments(str(tmp_path), optim=optim, use_cpu=True, report_to=[], **known)
    peft = get_peft_model(tiny_model("qwen2"), lora)
    theirs = {own_key(name): p for name, p in peft.named_parameters() if p.requires_grad}
    trainer = Trainer(peft, arguments)
    reference: Any = trainer.create_optimizer()
    for _ in range(2):  # the second time after the first has left its mark on the library
        model = tiny_model("qwen2")
        _, (adapter,) = attach(model, {"job": resolve(lora, model, "job")}, 0)
        ours, gradient = keyed(adapter, adapter.named_parameters()), torch.zeros_like(adapter.flat)
        views = keyed(adapter, adapter.layout.views(gradient))
        assert ours.keys() == theirs.keys()
        with torch.no_grad():
            for key, parameter in ours.items():
                parameter.copy_(theirs[key])
        optimizer = optimizer_of(adapter, TrainConfig.model_validate(known | {"optim": optim}))
        generator = torch.Generator().manual_seed(0)
        reference.state.clear()
        for _ in range(3):
            for key, parameter in theirs.items():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                views[key].copy_(parameter.grad)
            reference.step()
            optimizer.ready(gradient, set(), SETTINGS["learning_rate"])()
        for key, parameter in ours.items():
            assert torch.equal(parameter, theirs[key]), key
    kept = {name: own.get("state1") for name, own in optimizer.state().items()}
    if "8bit" in optim:
        narrow = {name for name, moments in kept.items() if moments is not None and moments.dtype == torch.uint8}
        assert narrow == {name for name, one in adapter.named_parameters().items() if name.endswith(("/A", "/B"))}


def own_key(name: str) -> str:
    """PEFT's name of a parameter as its files have it."""
    name = name.replace(".modules_to_save", "").replace(".default", "")
    return name.removesuffix(".weight") if "magnitude" in name else name


def test_a_state_that_does_not_fit_is_refused() -> None:
    layout = FlatLayout(SHAPES)
    flat = torch.zeros(layout.size)
    optimizer = LibraryOptimizer(flat, layout, TrainConfig(optim="adafactor"))
    gradient = torch.zeros_like(flat)
    for name, value in values(torch.float32).items():
        layout.views(gradient)[name].copy_(value)
    optimizer.ready(gradient, set(), 0.1)()
    state = optimizer.state()
    name = next(name for name, own in state.items() if "exp_avg_sq_row" in own)
    state[name]["exp_avg_sq_row"] = torch.zeros(99)
    with pytest.raises(ValueError, match=f"{name} has .*99"):
        optimizer.load(state)


def test_an_optimizer_that_cannot_be_had_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(optim: str, device: str = "cpu", dtype: str = "float32") -> str:
        job = JobConfig.model_validate({"name": "a", "data": {"path": "d"}, "train": {"optim": optim}})
        with pytest.raises(InputError) as caught:
            check_optim(job, torch.device(device), dtype)
        return str(caught.value)

    pytest.importorskip("bitsandbytes")
    assert "'a': train.optim: paged_adamw_8bit pages" in refusal("paged_adamw_8bit")
    assert "use adamw_8bit" in refusal("paged_adamw_8bit")
    assert "keeps no float64" in refusal("lion_32bit", dtype="float64")
    assert "has nothing for meta" in refusal("lion_32bit", device="meta")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'packlora[quant]'" in refusal("adamw_bnb_8bit")
