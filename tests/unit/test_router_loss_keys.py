"""When a job has a load-balancing loss: as its key says, else as the model's configuration does; else the key is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from conftest import TINY
from expert_models import MODELS
from pydantic import ValidationError
from transformers.models.qwen3_moe import modeling_qwen3_moe

from packlora.config import Run
from packlora.engine.objectives.balance import balance_losses
from packlora.engine.objectives.configured import router_coefficient
from packlora.errors import InputError


def skeleton(family: str, **changes: Any) -> Any:
    name, extra = MODELS.get(family, ("LlamaConfig", {}))
    with init_empty_weights():
        return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**TINY | extra | changes))


def asked(tmp_path: Path, coefficient: float | None = None, **keys: Any) -> Run:
    job = {"name": "x", "data": {"path": "rows.jsonl"}, "train": {"router_aux_loss_coef": coefficient}}
    return Run.model_validate({"base_model": "base", "output_dir": str(tmp_path / "out"), "jobs": [job], **keys})


def found(run: Run, model: Any) -> tuple[float, list[str]]:
    return router_coefficient(run, run.jobs[0], model)


WITHOUT = ("deepseek_v2", "deepseek_v3", "llama4")


@pytest.mark.parametrize("family", MODELS)
def test_every_family_with_such_a_loss_in_transformers_has_it(family: str, tmp_path: Path) -> None:
    model = skeleton(family)
    assert found(asked(tmp_path), model) == (0.0, [])
    if family in WITHOUT:
        with pytest.raises(
            InputError, match=rf"a {model.config.model_type} model has none in transformers; leave it out"
        ):
            found(asked(tmp_path, 0.1), model)
        assert found(asked(tmp_path), skeleton(family, output_router_logits=True)) == (0.0, [])
        return
    assert found(asked(tmp_path, 0.1), model) == (0.1, [])
    coefficient, (note,) = found(
        asked(tmp_path), skeleton(family, output_router_logits=True, router_aux_loss_coef=0.25)
    )
    assert coefficient == 0.25 and "job 'x': a load-balancing loss is added with 0.25" in note
    assert found(asked(tmp_path), skeleton(family, output_router_logits=True, router_aux_loss_coef=0.0)) == (0.0, [])


def test_0_is_without_it_whatever_the_model_is(tmp_path: Path) -> None:
    for model in (skeleton("llama"), skeleton("mixtral", output_router_logits=True)):
        assert found(asked(tmp_path, 0.0), model) == (0.0, [])


def test_what_has_no_such_loss_or_does_not_serve_it_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"job 'x': train.router_aux_loss_coef is 0.1, but .* a llama model has none"):
        found(asked(tmp_path, 0.1), skeleton("llama"))
    for value in (-0.1, float("nan"), 1e7):
        with pytest.raises(ValidationError, match="router_aux_loss_coef"):
            asked(tmp_path, value)


def test_a_model_whose_loss_is_another_one_is_refused(tmp_path: Path) -> None:
    def other(logits: Any, experts: int, top_k: int) -> torch.Tensor:
        return 1.01 * balance_losses(logits, [(0, len(logits[0]))], top_k)

    with mock.patch.object(modeling_qwen3_moe, "load_balancing_loss_func", other):
        with pytest.raises(InputError, match="that of a qwen3_moe model is another one; leave it out"):
            found(asked(tmp_path, 0.1), skeleton("qwen3_moe"))
        with pytest.raises(InputError, match=r"output_router_logits: true, .* set train.router_aux_loss_coef to 0"):
            found(asked(tmp_path), skeleton("qwen3_moe", output_router_logits=True))
    model = skeleton("qwen3_moe", output_router_logits=True)
    with (
        mock.patch.object(type(model), "__module__", "transformers_modules.own"),
        mock.patch.dict("sys.modules", {"transformers_modules.own": mock.Mock(spec=[])}),
        pytest.raises(
            InputError, match=r"the code of a qwen3_moe model is its own; set train.router_aux_loss_coef to 0"
        ),
    ):
        found(asked(tmp_path), model)
