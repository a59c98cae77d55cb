"""Plugin of pytest with which PEFT's own tests run on accelerated models.

    git clone https://github.com/huggingface/peft && cd peft
    PYTHONPATH=PACKLORA:PACKLORA/tests python -m pytest -p accelerated_peft tests/test_custom_models.py -k LoraConfig

PACKLORA is the folder of this repository; the environment has what PEFT's tests need (diffusers, datasets, parameterized).
Whatever passes without `-p accelerated_peft` must pass with it.
"""

from __future__ import annotations

from typing import Any

import peft
import pytest

import packlora

get_peft_model, from_pretrained = peft.get_peft_model, peft.PeftModel.from_pretrained.__func__
found = {"models": 0, "layers": 0, "accelerated": 0}


def accelerated(model: Any) -> Any:
    """The model after `packlora.accelerate`, counted."""
    report = packlora.accelerate(model)
    found["models"] += 1
    found["layers"] += len(report.modules)
    found["accelerated"] += report.accelerated
    return model


peft.get_peft_model = lambda *given, **named: accelerated(get_peft_model(*given, **named))
peft.PeftModel.from_pretrained = classmethod(
    lambda cls, *given, **named: accelerated(from_pretrained(cls, *given, **named))
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many models and layers were accelerated."""
    if found["models"]:
        terminalreporter.write_line(
            "packlora accelerated {accelerated} of {layers} adapted layers of {models} models".format(**found)
        )
