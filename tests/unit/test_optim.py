"""train.optim: steps are those of what transformers takes for the name, to the bit, and go on from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_flat import SHAPES, values

from packlora.adapters.flat import FlatLayout
from packlora.config import JobConfig, TrainConfig
from packlora.config.train import LACKED
from packlora.errors import InputError
from packlora.runtime.library_optimizer import LibraryOptimizer, check_optim
from packlora.runtime.optimizer import FlatAdamW

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
        optimizer.step(gradient, lacking, SETTINGS["learning_rate"])
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


def test_a_state_that_does_not_fit_is_refused() -> None:
    layout = FlatLayout(SHAPES)
    flat = torch.zeros(layout.size)
    optimizer = LibraryOptimizer(flat, layout, TrainConfig(optim="adafactor"))
    gradient = torch.zeros_like(flat)
    for name, value in values(torch.float32).items():
        layout.views(gradient)[name].copy_(value)
    optimizer.step(gradient, set(), 0.1)
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
