"""The frozen base model of a run, ready for packed training.

load.py reads it, packing.py runs it on packed samples, proof.py shows that it may be packed. Adapters are put on by
adapters/attach.py. A model in parts on several processes is loaded by parallel/sharded.py and parallel/cut.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from packlora.base.demo_model import base_path
from packlora.base.device import choose_device, settle_dtype
from packlora.base.fingerprint import Fingerprint, fingerprint
from packlora.base.load import read_config, read_model
from packlora.base.packing import prepare_model
from packlora.base.proof import OwnLogits, check_packing, own_logits
from packlora.base.shape import check_row
from packlora.config import Run
from packlora.form import form_in
from packlora.given import given
from packlora.ops.lora_linear.frozen import InMemory

if TYPE_CHECKING:
    from packlora.modality import Modality
    from packlora.ops.lora_linear.storage import Storage
    from packlora.weight_form import WeightForm


@dataclass(slots=True)
class Base:
    """A loaded base model and what was noticed while loading it."""

    model: PreTrainedModel
    tokenizer: Any
    device: torch.device
    path: str
    """Folder or hub id that was loaded; for the packaged model its folder."""
    warnings: list[str]
    fused_loss: bool = False
    """Whether the logits come from the output layer only, so that the loss need not hold them: see engine/heads.py."""
    liger: list[str] = field(default_factory=list)
    """Parts of the model that run on fused kernels, see base/liger.py."""
    kept_outputs: str | None = None
    """Description of the DoRA layers that keep their outputs, where the run requests it: adapters/kept_outputs.py."""
    storage: Storage = field(default_factory=InMemory)
    """Storage of the weights."""
    form: WeightForm | None = None
    """Form of the linear layers' weights; None for floats."""
    fingerprint: Fingerprint | None = None
    """Fingerprint of the whole model; None for a model that was not loaded."""
    modality: Modality | None = None
    """Processor of what the model reads beside texts, where the data has some of it."""


def load_base(
    run: Run, tokenizer: Any, longest: Mapping[str, int] | None = None, modality: Modality | None = None
) -> Base:
    """Load the base model for packed training: frozen, on its device, in the run's dtype. A model that a Python program has
    handed over is made ready as it is.

    Args:
        longest: tokens of the longest sample of each job. Longer ones are not known to be computed right; without it, than
            PROBE_TOKENS.
        modality: what it reads beside texts; None where no sample has any of it.

    Raises:
        InputError: it cannot be loaded, its weights are not those of its configuration, or packing would train it wrongly.
    """
    settle_dtype(run)
    path, device, dtype = base_path(run.base_model), choose_device(run.device), getattr(torch, run.dtype)
    loaded = given().model
    config = read_config(path, run.revision, run.trust_remote_code) if loaded is None else loaded.model.config
    form, notes = form_in(run, config, path), list[str]()
    if loaded is not None:
        model = loaded.ready(form, path, notes)
    elif form is None:
        model = read_model(path, run.revision, dtype, run.trust_remote_code).to(device)
    else:
        model = form.read(path, run.revision, dtype, device, run.trust_remote_code, notes)
    check_row(model, run.max_tokens_per_microbatch, path)
    base = ready_base(run, model, tokenizer, device, path, longest or {}, InMemory(), modality=modality)
    base.form = form
    base.warnings += notes
    return base


LookedAt = tuple[Fingerprint, OwnLogits]
"""Fingerprint and logits of a model as transformers runs it."""


def look_at(
    run: Run, model: PreTrainedModel, path: str, longest: Mapping[str, int], in_memory: bool = False
) -> LookedAt:
    """Fingerprint and own logits of a whole model, before it is packed; a model sharded by rows counts as whole. in_memory: the
    model is not sharded. Raises InputError."""
    return fingerprint(model, path, run.revision), own_logits(model, path, longest, is_whole=in_memory)


def ready_base(
    run: Run, model: PreTrainedModel, tokenizer: Any, device: torch.device, path: str, longest: Mapping[str, int],
    storage: Storage, looked_at: LookedAt | None = None, modality: Modality | None = None,
) -> Base:  # fmt: skip
    """A model on its device, as transformers runs it, made ready for packed training, with the proof that it may be packed.

    Args:
        looked_at: of the whole model, where this one is a process's part of it: what is packed is held against the whole one.

    Raises:
        InputError: packing would train it wrongly.
    """
    known, own = looked_at or look_at(run, model, path, longest, storage.is_whole)
    with_extras = None if modality is None else modality.own(model, path)
    if run.offload_embedding:
        from packlora.base.host_embedding import move_to_host

        move_to_host(model, storage.is_whole)
    notes = prepare_model(model, run.gradient_checkpointing)
    if run.activation_offloading:
        from packlora.base.activation_offloading import offload_inputs

        offload_inputs(model, device, path, storage.is_whole)
    replaced: list[str] = []
    if run.liger is True or (run.liger == "auto" and device.type == "cuda"):
        from packlora.base.liger import use_liger

        replaced = use_liger(model, run.liger, storage.each)
    fused_loss = check_packing(model, own, path, longest, notes)
    if modality is not None:
        modality.check(model, with_extras, path)
    return Base(
        model, tokenizer, device, path, notes, fused_loss, replaced, storage=storage, fingerprint=known,
        modality=modality,
    )  # fmt: skip
