"""Jobs whose adapter begins with what is in the weights of the base: what that takes, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from packlora.adapters.spec import AdapterSpec
from packlora.adapters.starts import check_starts
from packlora.base.demo_model import base_path
from packlora.base.load import read_skeleton
from packlora.base.weight_files import WeightFiles, keys_there
from packlora.config import JobConfig, Run
from packlora.errors import InputError
from packlora.form import is_stored
from packlora.parallel.alone import world_size


def check_start_of_weights(run: Run, job: JobConfig, spec: AdapterSpec, skeleton: PreTrainedModel) -> None:
    """Raises InputError where a job whose adapter begins with what is in weights cannot begin as init_lora_weights says."""
    start, path = spec.modules[spec.of_weights[0]].start, base_path(run.base_model)
    check_starts(spec, skeleton, job.name)
    if job.adapter.init_from is not None:  # its folder has the first values
        return
    if world_size() > 1:
        raise InputError(
            f"job {job.name!r}: init_lora_weights: {start} is for one process in this version, and {world_size()} train; "
            "leave it out"
        )
    if start == "loftq" and not quantises(run, skeleton):
        raise InputError(
            f"job {job.name!r}: init_lora_weights: loftq makes up for what quantization loses, and base_model {path!r} is not "
            "quantised while it is loaded; set quantization, for a base that is saved as floats"
        )


def quantises(run: Run, skeleton: PreTrainedModel) -> bool:
    """Whether a base is saved as floats, and quantised while it is loaded."""
    return run.quantization is not None and not is_stored(skeleton.config)


def float_weights(run: Run) -> Callable[[str], torch.Tensor]:
    """Gives the weight [N, K] of a layer as the base's files have it."""
    path = base_path(run.base_model)
    files, skeleton = WeightFiles(path, run.revision), read_skeleton(path, run.revision, run.trust_remote_code)
    skeleton.tie_weights()
    keys = keys_there(skeleton, files)

    def read(layer: str) -> torch.Tensor:
        if (key := keys.get(f"{layer}.weight")) is None:
            raise InputError(
                f"base_model {path!r}: init_lora_weights: loftq wants the weight of {layer}, which the files do not have as it "
                "is"
            )
        return files.read(key)

    return read
