"""Adapters as PEFT models: a finished adapter on the base model that it was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftModel

from packlora.answers.talk import BaseOf
from packlora.api.borrowed import sharing
from packlora.commands.adapter_folder import check_folder


def load(folder: Path, base: Any = None) -> PeftModel:
    """Load an adapter folder as a PeftModel in evaluation mode.

    Args:
        base: a loaded model, whose weights are shared and which stays as it is; None: the base that the folder names is read.

    Raises:
        InputError: the folder holds no adapter, or its base cannot be loaded.
    """
    check_folder(folder)
    model = BaseOf.of([folder], None, "auto", "auto").load(for_peft=True) if base is None else sharing(base)
    return PeftModel.from_pretrained(model, str(folder)).eval()
