"""`packlora plan MODEL --gpu "24 GB"`: which settings of a LoRA job fit on a card, by the estimate, without a run file.

Of the model its config.json is enough. Owns the settings that are listed and the table; the estimate is runtime/estimate.py's.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.text import Text
from transformers import PreTrainedModel

from packlora.base.classes import unknown_architecture
from packlora.base.demo_model import base_path
from packlora.base.host_embedding import why_on_device
from packlora.base.load import load_skeleton, read_config
from packlora.base.mixers import DELTA_RULE, mixing_functions
from packlora.base.shape import context_of, decoder_layers
from packlora.commands.plan_tables import print_table, write_named
from packlora.data.dataset import JobData
from packlora.data.encode import Encoded, Sample
from packlora.errors import InputError, plural, quoted
from packlora.files import write_json
from packlora.form import choices, form_in
from packlora.report.screen import table_screen
from packlora.run_file import run_from
from packlora.runtime.estimate import memory_parts
from packlora.runtime.fit import GIB, measures_of, words
from packlora.runtime.prepare import adapter_config, adapter_spec
from packlora.runtime.prepared_job import ModelShape, PreparedJob, products_kept, trainable_parameters
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import ROOM_SHARE

LENGTH = 2048
"""Tokens of a sample where nothing is said, of a model whose context is as long."""
STATES = ("A_log", "fgate_preact.weight", "recurrent_param", "slope_rate", "time_decay")
"""Ends of the names that the decay of a state has in transformers' models: Mamba and delta rules, xLSTM, Griffin, lightning
attention, RWKV. A state under another name is found by training alone."""
CARD = re.compile(r"(\d+(?:\.\d+)?)\s*(g|gb|gib)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of a run, and their memory on a card.

    keys: of a run file. parts: bytes by what holds them, in a microbatch of one sample. tokens: most of a microbatch that fits;
    0 where none does.
    """

    keys: dict[str, Any]
    parts: dict[str, int]
    tokens: int

    @property
    def peak(self) -> int:
        """Bytes."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.tokens > 0


@dataclass(frozen=True, slots=True)
class Card:
    """Settings of a model on a card.

    context: most tokens of a sample. room: bytes of the card. length: tokens of a sample.
    """

    model: str
    shape: ModelShape
    context: int
    room: int
    rank: int
    length: int
    settings: tuple[Setting, ...]

    @property
    def taken(self) -> dict[str, Setting | None]:
        """Settings that `fit` takes, by its value: the first that fit, which are listed from the fastest on."""
        fitting = [one for one in self.settings if one.fits]
        exact = [one for one in fitting if "quantization" not in one.keys]
        return {"memory": exact[0] if exact else None, "auto": fitting[0] if fitting else None}

    def to_json(self) -> dict[str, Any]:
        rows = [{**asdict(one), "peak_bytes": one.peak, "fits": one.fits} for one in self.settings]
        own = {"base_model": self.model, "card_bytes": self.room, "r": self.rank, "length": self.length}
        taken = {key: None if one is None else one.keys for key, one in self.taken.items()}
        return {**own, "shape": asdict(self.shape), "settings": rows, "taken": taken}


def card_bytes(text: str) -> int:
    """Bytes of a card as its vendor counts them, in units of 2**30: "24 GB". Raises InputError."""
    found = CARD.fullmatch(text.strip())
    if found is None or not 1 <= float(found[1]) <= 10_000:
        raise InputError(f'--gpu is {quoted(text)}; give the memory of a card from 1 to 10000 GB, such as "24 GB"')
    return int(float(found[1]) * GIB)


def settings_of(
    model: str, room: int, rank: int = 16, length: int = LENGTH, forms: Sequence[Mapping[str, Any]] | None = None
) -> Card:
    """Settings of a LoRA job on all linear layers, and whether they fit.

    Args:
        model: folder or hub id with a config.json.
        room: bytes of the card.
        length: tokens of each sample, all of which are learnt; also more than the model takes.
        forms: keys of a run file for the form of the base; None: as it is saved, and those that fit: auto may choose.

    Raises:
        InputError: there is no such model, or none that is trained here.
    """
    job = {"name": "a", "data": {"path": "-"}, "adapter": {"r": rank}, "train": {"global_batch_size": 1}}
    tree = {"base_model": model, "output_dir": "-", "dtype": "bfloat16", "device": "cpu", "jobs": [job]}
    run = run_from(tree)
    skeleton, config = load_skeleton(run), run.jobs[0]
    check_generates(skeleton, model, read_config(base_path(model), None))
    check_packs(skeleton, model)
    spec = adapter_spec(config, adapter_config(config, run), skeleton)
    trainable, products = trainable_parameters(spec, skeleton), products_kept(spec, skeleton)
    samples = [Sample(np.zeros(length, np.int32), np.arange(length) > 0)]
    data = JobData("a", samples, config.train, 0)
    made = PreparedJob(config, data, Encoded(samples), Encoded([]), spec, trainable, trainable, products=products)
    prepared = PreparedRun(run, None, length, ModelShape.of(skeleton), [made])
    possible = {
        "gradient_checkpointing": skeleton.supports_gradient_checkpointing,
        "offload_embedding": why_on_device(skeleton, spec.modules) is None,
        "activation_offloading": skeleton.supports_gradient_checkpointing,
    }
    out = []
    for form in ({}, *choices(run, skeleton.config)) if forms is None else forms:
        found = form_in(run_from({**tree, **form}), skeleton.config, model)
        prepared.form = found and found.counted(skeleton, model, torch.bfloat16)
        for measures in measures_of(run, possible):
            own = run.model_copy(update=measures)
            keys = dict(form) | {key: value for key, value in measures.items() if value}
            parts = partial(memory_parts, own, prepared, kernels=True)
            out.append(Setting(keys, parts(length), _most(parts, length, room)))
    return Card(model, prepared.shape, context_of(skeleton.config), room, rank, length, tuple(out))


def check_generates(skeleton: PreTrainedModel, path: str, config: Any) -> None:
    """Refuse a model that training would refuse when its weights are there: one that does not continue texts.

    Args:
        config: of the folder.
    """
    attention = {
        module.is_causal
        for layer in decoder_layers(skeleton).values() for module in layer.modules() if hasattr(module, "is_causal")
    }  # fmt: skip
    named = unknown_architecture(config)
    tied = str(named).endswith("Model") and config.get_text_config().tie_word_embeddings
    if attention == {False}:
        reason = "tokens see those behind them, as in an encoder"
    elif named is not None and hasattr(transformers, named) and not tied:
        reason = f"its config.json names {named}, which has no output layer for tokens"
    else:
        return
    raise InputError(
        f"base_model {path!r}: packlora trains models that continue texts, which this one does not: {reason}"
    )


def check_packs(skeleton: PreTrainedModel, path: str) -> None:
    """Refuse a model that training's proof of packing would refuse: one whose layers have a state that runs through the whole
    row (STATES), by a function that is not called sample by sample (base/mixers.py)."""
    names = [name for name, _ in (*skeleton.named_parameters(), *skeleton.named_buffers())]
    has_state = any(name.endswith(STATES) for name in names)
    if has_state and all(name != DELTA_RULE for _, name in mixing_functions(skeleton)):
        raise InputError(
            f"base_model {path!r}: packlora cannot train a {skeleton.config.model_type} model: samples that are packed "
            "together see each other by the state that its layers hand from token to token"
        )


def _most(parts: Callable[[int], dict[str, int]], length: int, room: int) -> int:
    """The most tokens, at least `length`, whose memory fits on a card; 0 where none do. For few tokens the gradients are the
    peak, so it is no straight line."""

    def peak(tokens: int) -> int:
        return sum(parts(tokens).values())

    if peak(length) > ROOM_SHARE * room:
        return 0
    fits, more = length, 2 * length
    while peak(more) <= ROOM_SHARE * room:
        fits, more = more, 2 * more
    return fits + bisect_right(range(fits + 1, more), ROOM_SHARE * room, key=peak)


def print_card(
    model: str, gpu: str, rank: int, length: int | None, json_file: Path | None = None, refused: Sequence[str] = ()
) -> None:
    """Print the table, and write it as JSON where a file is given.

    Args:
        length: None: LENGTH, or the model's context where that is shorter.
        refused: options of a run file that were given as well.

    Raises:
        InputError: as settings_of, samples are longer than the model's context, or options do not go together.
    """
    if refused:
        raise InputError(f"--gpu is of a model, without a run file; {refused[0]} is of a run; leave one of them out")
    if Path(model).is_file():
        raise InputError(
            f"--gpu lists settings of a model, and {model} is a file; give the folder or hub id of a model, or leave --gpu "
            "out: what a run needs is in its own plan"
        )
    found, console = settings_of(model, card_bytes(gpu), rank, length or LENGTH), table_screen()
    if found.length > found.context:
        if length is not None:
            raise InputError(f"--length is {length}, over the model's context of {found.context} tokens; give no more")
        length = found.context
        found = settings_of(model, found.room, rank, length)

    def say(text: str) -> None:
        console.print(Text(text), soft_wrap=not console.is_terminal)

    shape = found.shape
    say(
        f"{model}: {shape.parameters / 1e6:,.1f} M parameters, {plural(shape.layers, 'layer')}; LoRA r {rank} on all linear "
        f"layers, samples of {found.length} tokens, bfloat16"
    )
    say(
        f"a card of {found.room / GIB:g} GB: {ROOM_SHARE * found.room / GIB:.1f} GiB are planned with, the rest is the "
        "allocator's and CUDA's own; never measured by this command"
    )
    rows = [
        (
            words(one.keys) or "defaults", *(f"{size / GIB:.2f}" for size in one.parts.values()), f"{one.peak / GIB:.1f}",
            f"{one.tokens:,}" if one.fits else "-", "" if one.fits else "does not fit",
        )
        for one in found.settings
    ]  # fmt: skip
    names = [name.replace("adapters and optimizer", "adapters") for name in found.settings[0].parts]
    console.print()
    print_table(console, ("settings", *names, "peak GiB", "most tokens", ""), rows)
    console.print()
    for key, one in found.taken.items():
        if one is None:
            say(f"fit: {key} has nothing that fits; take a smaller model, shorter samples, or several cards (parallel)")
        else:
            say(
                f"fit: {key} takes {words(one.keys) or 'the defaults'}: {one.peak / GIB:.1f} GiB for one sample at a time"
            )
    if json_file is not None:
        write_named(json_file, lambda file: write_json(file, found.to_json()))
        say(f"wrote {json_file}")
