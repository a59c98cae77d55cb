"""A frozen base model of which each process holds some consecutive layers: `parallel: {pipeline: N}`.

A stage is the model with its own layers. In the places of all others stand modules that let hidden states pass; before the
first own layer they are those of the stage below, behind the last one they go to the stage above. So a stage runs the model's
own forward: what is computed beside the layers, positions and masks, is computed on every stage. The embedding is on the first
stage, the output layer on the last one, also where they are tied. What else there is (norms) is on all, and trained on the
first or the last one, whichever its place is beside.

A stage may be cut over several processes (tensor.py), or its experts shared out (experts/cut.py). Hidden states pass whole
between stages, from each process to the one in its own place.

Only models are cut whose layers hand hidden states [1, T, D] from one to the next. The proof of packing runs through all
stages.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.base.demo_model import base_path
from packlora.base.device import choose_device, settle_dtype
from packlora.base.fingerprint import fingerprint_of, word_sums
from packlora.base.liger import use_liger
from packlora.base.model import Base
from packlora.base.packing import decoder_of, hidden_states, packed_logits, prepare_model
from packlora.base.proof import Pack, check_packing, depends_on_others, own_logits
from packlora.base.shape import check_row, decoder_layers
from packlora.base.weight_files import WeightFiles, keys_of
from packlora.config import Run
from packlora.ops.lora_linear.frozen import InMemory
from packlora.parallel.alone import OneProcess
from packlora.parallel.cut import fill
from packlora.parallel.sharded import empty_model, fill_by_rows
from packlora.parallel.tensor import cut_model
from packlora.pipeline.checks import check_layers, ends_of, layer_chain
from packlora.pipeline.links import Links


class Stage(InMemory):
    """This process's part of a model, and the Storage of it.

    Args:
        links: to the other stages.
        layers: numbers of the layers that are here.
        width, dtype: of the hidden states.
    """

    is_whole, can_record = False, False

    def __init__(self, links: Links, layers: range, width: int, dtype: torch.dtype) -> None:
        self.links, self.layers, self.width, self.dtype = links, layers, width, dtype
        self.at_end: dict[str, bool] = {}
        """See ends_of."""
        self.routes = False
        """Whether a layer here has a router whose output transformers records."""
        self.outgoing: torch.Tensor | None = None
        """Hidden states [1, T, D] that the last forward has left for the stage above."""
        self._incoming: torch.Tensor | None = None
        self._in_step = False

    def holds(self, path: str) -> bool:
        behind = self.at_end.get(path)
        return behind is None or (self.links.is_last if behind else self.links.is_first)

    @contextmanager
    def given(self, incoming_TD: torch.Tensor | None) -> Iterator[None]:
        """Around a forward of the model: hidden states [1, T, D] of the stage below; None on the first stage."""
        self._incoming, self.outgoing = incoming_TD, None
        try:
            yield
        finally:
            self._incoming = None

    @contextmanager
    def in_step(self, model: PreTrainedModel) -> Iterator[None]:
        """Here the model gives the logits of the whole one, on every stage. All stages run it as often, without gradients."""
        own = model.forward
        model.forward = partial(self._logits, model, own)
        self._in_step = True
        try:
            yield
        finally:
            self._in_step, model.forward = False, own

    def _logits(self, model: PreTrainedModel, own: Any, **inputs: Any) -> Any:
        if self.links.is_last:
            return SimpleNamespace(logits=self.links.of_last(own(**inputs).logits))
        inputs.pop("logits_to_keep", None)
        decoder_of(model)(**inputs)
        return SimpleNamespace(logits=self.links.of_last(None))

    def crosses(self, model: PreTrainedModel, pack: Pack, n: int) -> bool:
        """Check as proof.gradient_crosses does, which tokens of a stage's layers would have to show on one stage at least. All
        stages call it, each looks at its own layers."""
        ids, positions, lengths, _ = pack.inputs
        hidden = None
        if not self.links.is_first:
            noise = torch.randn(
                1, len(ids), self.width, generator=torch.Generator().manual_seed(0), dtype=torch.float64
            )
            hidden = noise.to(ids.device, self.dtype)

        def outputs() -> torch.Tensor:
            last = hidden_states(model, ids, positions, lengths)
            return last if self.outgoing is None else self.outgoing[0]

        before, self._in_step, self.outgoing = self._in_step, False, None
        try:
            found = depends_on_others(model, n, outputs, hidden)
        finally:
            self._in_step, self.outgoing = before, None
        return any(self.links.gather(found))

    @torch.no_grad()
    def logits(
        self, model: PreTrainedModel, ids_T: torch.Tensor, positions_T: torch.Tensor, lengths: Sequence[int],
        rows_L: torch.Tensor,
    ) -> torch.Tensor | None:  # fmt: skip
        """Logits as of packed_logits on the last stage, None elsewhere. All stages call it; microbatches may be on their
        way."""
        shape = (1, len(ids_T), self.width)
        with self.given(None if self.links.is_first else self.links.up.receive(shape, self.dtype)):
            if self.links.is_last:
                return packed_logits(model, ids_T, positions_T, lengths, rows_L)
            hidden_states(model, ids_T, positions_T, tuple(lengths))
            assert self.outgoing is not None
            outgoing, self.outgoing = self.outgoing.contiguous(), None
        self.links.up.send(outgoing, shape, self.dtype)
        return None

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Input of the first layer here, which replaces the zeros that NoEmbedding gave."""
        if self._in_step:
            return self.links.up.receive(hidden.shape, hidden.dtype)
        return hidden if self._incoming is None else self._incoming

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Take what the last layer here gives. Returns what the rest of the model may be run on, which is for nothing: hidden
        states of the same shape, as some models have it in mind (GPT-2), without gradients."""
        self.outgoing = hidden
        if self._in_step:
            self.links.up.send(hidden.contiguous(), hidden.shape, self.dtype)
            self.links.up.drain()
        return hidden.detach()


class Elsewhere(torch.nn.Module):
    """Stand-in for a layer that is on another stage.

    Args:
        layer: which it is, on the meta device; what the model asks it for beside its forward is kept.
        gives_tuple: whether it gives its hidden states in a tuple.
    """

    def __init__(self, stage: Stage, number: int, layer: torch.nn.Module, gives_tuple: bool) -> None:
        super().__init__()
        self._stage, self._number, self._gives_tuple = stage, number, gives_tuple
        for name, value in vars(layer).items():
            if isinstance(value, str | int | bool) and not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._number == self._stage.layers.start - 1:
            hidden_states = self._stage.enter(hidden_states)
        elif self._number == self._stage.layers.stop:
            hidden_states = self._stage.leave(hidden_states)
        return (hidden_states,) if self._gives_tuple else hidden_states


class NoEmbedding(torch.nn.Module):
    """Stand-in for the embedding on all stages but the first."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._shape = weight.shape
        self.register_buffer("_zero", torch.zeros(1, 1, dtype=weight.dtype), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """Weight of its shape, dtype and device, which some models ask for; without memory."""
        return self.get_buffer("_zero").expand(self._shape)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*ids.shape, self._shape[1], dtype=self.weight.dtype, device=ids.device)


def load_stage(
    run: Run, tokenizer: Any, longest: Mapping[str, int], mesh: OneProcess, links: Links, counts: Sequence[int],
    weights: WeightFiles | None = None,
) -> Base:  # fmt: skip
    """Load this process's stage of the base model for packed training. All processes call it, with equal arguments; none reads
    more than its own weights.

    Args:
        longest: see load_base.
        counts: layers of each stage.
        weights: of the base model; None: its files.

    Raises:
        InputError: see load_base; or the model cannot be cut. On every process.
    """
    settle_dtype(run)
    path, device = base_path(run.base_model), choose_device(run.device)
    files = mesh.together(lambda: weights or WeightFiles(path, run.revision))

    def empty() -> tuple[PreTrainedModel, Stage, dict[str, str], dict[str, torch.Tensor]]:
        model = empty_model(path, run.revision, getattr(torch, run.dtype), run.trust_remote_code)
        check_row(model, run.max_tokens_per_microbatch, path)
        held, keys = model.state_dict(), _keys(model, files)
        return model, cut(model, links, counts), keys, held

    model, stage, keys, held = mesh.together(empty)
    notes = [f"a pipeline of {len(counts)} stages, of {', '.join(map(str, counts))} layers"]
    if (beside := links.beside) is None:
        mesh.together(lambda: fill(model, files, keys, device))
        model.to(device)
    else:  # held against a stage that is sharded by rows, as in parallel/cut.py
        mesh.together(lambda: fill_by_rows(model, beside, device, files, keys))
    sums = dict(zip(model.state_dict(), word_sums([*model.state_dict().values()]), strict=True))
    every = {name: value for one in links.gather(sums) for name, value in one.items()}
    known = fingerprint_of(held, every, path, run.revision)
    with stage.in_step(model):
        own = own_logits(
            model, path, longest, lambda bad: [name for found in links.gather(bad) for name in found], is_whole=False
        )
    for limits in links.gather(own.limits):
        own.limits |= limits
    if beside is not None:
        del model
        gc.collect()  # its modules and their hooks refer to one another
        model, stage, keys, _ = mesh.together(empty)
        layers = links.layers if links.layers is not None and run.parallel.expert > 1 else beside
        notes += mesh.together(lambda: cut_model(run.parallel, model, layers, beside))
        mesh.together(lambda: fill(model, files, keys, device))
        model.to(device)
    with stage.in_step(model):
        notes += prepare_model(model, run.gradient_checkpointing)
        replaced = mesh.together(lambda: use_liger(model, run.liger))
        fused_loss = check_packing(model, own, path, longest, notes, partial(stage.crosses, model))
    return Base(model, tokenizer, device, path, notes, fused_loss, replaced, storage=stage, fingerprint=known)


def _keys(model: PreTrainedModel, files: WeightFiles) -> dict[str, str]:
    """Map the name of every tensor of the model that is read to its key in the files; tied ones that are there once share
    it."""
    keys = keys_of(model, files)
    tied = {
        id(parameter): keys[name] for name, parameter in model.named_parameters(remove_duplicate=False) if name in keys
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        keys.setdefault(name, tied[id(parameter)])
    return keys


def cut(model: PreTrainedModel, links: Links, counts: Sequence[int]) -> Stage:
    """Make a model, whole and on the meta device, this process's stage of it, in place.

    Raises:
        InputError: it cannot be cut.
    """
    layers = decoder_layers(model)
    width, dtype, tuples = layer_chain(model)
    check_layers(model, sum(counts))
    first = sum(counts[: links.stage])
    stage = Stage(links, range(first, first + counts[links.stage]), width, dtype)
    stage.at_end = ends_of(model)
    for number, (path, layer) in enumerate(layers.items()):
        if number not in stage.layers:
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, Elsewhere(stage, number, layer, tuples[number]))
    if not links.is_first:
        model.set_input_embeddings(NoEmbedding(model.get_input_embeddings().weight))
    if not links.is_last:
        model.set_output_embeddings(torch.nn.Identity())
    stage.routes = _routes(model)
    return stage


def _routes(model: PreTrainedModel) -> bool:
    """Whether the model has a module of which transformers records router_logits."""
    asked = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits", [])
    kinds = [getattr(one, "target_class", one) for one in (asked if isinstance(asked, list) else [asked])]
    return any(isinstance(module, kind) for kind in kinds if isinstance(kind, type) for module in model.modules())
