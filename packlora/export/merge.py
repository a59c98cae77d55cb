"""`packlora merge`: fold a PEFT adapter into its base model's weights.

    LoRA   W + s B A          DoRA   diag(m / ||W + s B A||_row) (W + s B A)          and the trained biases

An adapter that was trained on a quantised base is folded into what the codes stand for, of all layers that were quantised: that
is the model it was trained for. So is one whose base is saved in codes. The result is dense. Where an output layer is tied to
an embedding and the adapter tells them apart, both are written.

A model that is asked for in codes is quantised once it is whole (requantise.py), so for a while its folder has both. The sum is
made in float32 whatever the base is stored in, and rounded once. The base's files are read and written one after
the other, so that memory holds one of them and not the model.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import cached_file

from packlora.adapters.reading import read_trained_on
from packlora.base.classes import ClassOf
from packlora.base.device import choose_device
from packlora.base.load import read_model, read_tokenizer
from packlora.base.own_tokenizer import own_template, own_tokenizer
from packlora.base.shape import vocabulary
from packlora.base.weight_files import WeightFiles, keys_there
from packlora.codes.dense_files import DequantisedFiles
from packlora.codes.load import quantised_paths, read_quantised
from packlora.codes.stored import Stored, stored_as
from packlora.commands.adapter_folder import AdapterFolder, of_the_base, open_adapter
from packlora.data.template import templated
from packlora.errors import InputError, quoted
from packlora.export.as_served import classes, compare, not_compared, why_not
from packlora.export.merged import Codes, Merged, made_in
from packlora.export.output import check_output, written
from packlora.export.requantise import asked_codes, requantise
from packlora.files import write_folder

OLDER_TEMPLATE = "chat_template.json"
BESIDE = (
    "generation_config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    OLDER_TEMPLATE,
)  # fmt: skip
"""Files of a base that a merged model has as they are, where they are there: how it answers, and how it reads images."""


def merge_adapter(
    adapter_dir: Path,
    out: Path,
    base_model: str | None = None,
    dtype: str = "auto",
    quantization: str = "auto",
    double_quant: bool = False,
    requantize: str = "none",
    check: str = "auto",
) -> str | None:
    """Write the merged model and its tokenizer to `out`, as a plain Hugging Face folder.

    Args:
        adapter_dir: a PEFT LoRA or DoRA adapter folder.
        out: the folder to write; must not exist or be empty.
        base_model: where to load the base from; default is the adapter's base_model_name_or_path.
        dtype: of the result; auto keeps the base's.
        quantization: what of the base the adapter is folded into: none, its weights; nf4, fp4 or int8, what these codes of them
            stand for; auto, as the adapter was trained by packlora.
        double_quant: of nf4 and fp4.
        requantize: none, or what codes the merged model is saved in, one of requantise.KINDS.
        check: whether the merged model's logits are held against the adapter's before `out` appears, see as_served.py.

    Returns:
        What the user should know: the adapter names another base model, one that is not on this machine or of the same
        architecture; that the tokenizer is the adapter's own; how far the weights that it was folded into are from those of the
        base, codes from the merged ones, and merged weights of 16 bits from exact ones; why logits were not compared.

    Raises:
        InputError: the adapter, the base or the output folder cannot be used, the adapter was made for another architecture,
            or the result would not be finite, or does not give the adapter's logits.
        WriteError: the disk is full or broken.
    """
    check_output(out, dtype)
    codes = asked_codes(requantize)
    opened = open_adapter(adapter_dir, base_model)
    unchecked = why_not(check, opened)
    base, revision, skeleton = opened.base, opened.config.revision, opened.skeleton
    kept = skeleton.config.dtype or torch.float32
    with of_the_base():
        of_base = read_tokenizer(base, revision)
        tokenizer, of_tokens = _tokenizer(opened, of_base)
        source = Source.of(opened, quantization, double_quant, kept)
    into = source.into
    merged = Merged(
        source.files, opened.spec, opened.tensors, kept if dtype == "auto" else getattr(torch, dtype), adapter_dir
    )
    merged.find(source.keys, skeleton)
    merged.find_experts(source.keys, skeleton)
    if into is not None:
        into.keys = {
            source.keys[name] for path in quantised_paths(skeleton) if (name := f"{path}.weight") in source.keys
        }
        merged.codes = into
    made: list[str] = []

    def write(folder: Path) -> None:
        dense = folder if codes is None else folder / "dense"
        dense.mkdir(exist_ok=True)
        merged.write(dense)
        _write_config(dense, opened.base_config, merged, type(skeleton).__name__)
        made.extend(
            not_compared("the merged model", unchecked)
            if unchecked is not None
            else _compared(opened, source, merged, dense)
        )
        if codes is not None:
            made.append(requantise(dense, folder, codes, merged.dtype, merged.spec.modules, merged.added))
            shutil.rmtree(dense)
        for name in BESIDE:
            _copy(name, base, revision, folder)
        tokenizer.save_pretrained(folder)
        if tokenizer.chat_template not in (None, of_base.chat_template):
            (folder / OLDER_TEMPLATE).unlink(missing_ok=True)  # a processor would go by the base's

    with written(out) as path:
        write_folder(path, write)
    folded = source.told(codes is None)
    rounded = merged.told() if codes is None else ""
    return "; ".join(text for text in (opened.note, of_tokens, folded, *made, rounded) if text) or None


def _tokenizer(opened: AdapterFolder, tokenizer: Any) -> tuple[Any, str]:
    """The tokenizer of the merged model, and what to say of it: that of the base, or the adapter's own where its folder has
    one."""
    own, rows = own_tokenizer(opened.path, tokenizer), vocabulary(opened.skeleton)
    if (template := own_template(opened.path)) is not None:
        return templated(
            tokenizer, template
        ), f"the chat template is that in {opened.path}, which the adapter was trained with"
    if own is None:
        return tokenizer, ""
    if max(own.tokenizer.get_vocab().values()) >= rows:
        return tokenizer, (
            f"the tokenizer is the base's: that in {opened.path} has tokens beyond the {rows} embeddings of the base"
        )
    return own.tokenizer, f"the tokenizer is that in {opened.path}, which has {own.what} than the base's"


@dataclass(frozen=True, slots=True)
class Source:
    """Weights that an adapter is merged into. keys: keys of the files, by the model's names. stored: quantisation in which the
    base is saved. into: codes that are made of its weights."""

    files: WeightFiles | DequantisedFiles
    keys: Mapping[str, str]
    stored: Stored | None
    into: Codes | None

    @staticmethod
    def of(opened: AdapterFolder, quantization: str, double_quant: bool, dtype: torch.dtype) -> Source:
        """dtype: of the base. Raises InputError."""
        base, revision, skeleton = opened.base, opened.config.revision, opened.skeleton
        stored = stored_as(opened.base_config, base)
        if stored is not None:
            dense = _in_codes(opened.path, quantization, stored, base, revision, dtype)
            return Source(dense, dense.keys, stored, None)
        files = WeightFiles(base, revision)
        skeleton.tie_weights()
        keys = keys_there(skeleton, files)
        return Source(files, keys, None, Codes.of(opened.path, quantization, double_quant, dtype))

    def load(self, opened: AdapterFolder, class_of: ClassOf) -> PreTrainedModel:
        """The base as an adapter was trained on it. class_of: see read_model."""
        base, revision = opened.base, opened.config.revision
        if self.into is not None:
            asked, dtype = self.into.quantization, self.into.dtype
        elif self.stored is not None:
            asked, dtype = self.stored.as_asked, self.files.dtype  # type: ignore[union-attr]
        else:
            return read_model(base, revision, torch.float32, class_of=class_of)
        device = choose_device("auto")
        return read_quantised(base, revision, asked, self.stored, dtype, device, class_of=class_of)

    def told(self, is_dense: bool) -> str:
        """Describe the weights if they are not the base's own. is_dense: the merged model has no codes."""
        if self.into is not None:
            folded = self.into.told()
        elif self.stored is not None:
            folded = f"the adapter is folded into what the base's {self.stored.as_asked.described} codes stand for"
        else:
            return ""
        return folded + "; the model is dense" * is_dense


def _compared(opened: AdapterFolder, source: Source, merged: Merged, folder: Path) -> list[str]:
    """Hold the logits of a merged folder against the adapter's, see as_served.compare."""
    served = {
        name: partial(read_model, str(folder), None, torch.float32, class_of=cls)
        for name, cls in classes(opened).items()
    }
    return compare(opened, partial(source.load, opened), served, "the merged model", merged.lost_share)


def _in_codes(
    adapter_dir: Path, asked: str, stored: Stored, base: str, revision: str | None, dtype: torch.dtype
) -> DequantisedFiles:
    """A base that is saved in codes. dtype: of the base, for adapters that do not say in which they were trained."""
    own, told = stored.as_asked, read_trained_on(adapter_dir)
    if asked not in ("auto", "none", own.method):
        raise InputError(f"--quantization {asked}, but base_model {base!r} is saved as {own.described}; leave it out")
    if asked == "auto" and told is not None and told.get("method") != own.method:
        raise InputError(
            f"{adapter_dir} says that its base was quantised by {quoted(told)}, but base_model {base!r} is saved as "
            f"{own.described}; give the base that it was trained on, or --quantization none"
        )
    made = dtype if told is None else made_in(told, dtype, adapter_dir)
    return DequantisedFiles(base, revision, stored, made, choose_device("auto"))


def _copy(name: str, base: str, revision: str | None, folder: Path) -> None:
    """A file of the base, where it has it."""
    if found := cached_file(base, name, revision=revision, _raise_exceptions_for_missing_entries=False):
        shutil.copyfile(found, folder / name)


def _write_config(folder: Path, config: Any, merged: Merged, architecture: str) -> None:
    """The base's own configuration, so that whatever builds the base builds the merged model.

    Args:
        architecture: what it is to name where it names none.
    """
    config.dtype = merged.dtype
    for part in filter(None, (getattr(config, name, None) for name in config.sub_configs)):
        part.dtype = merged.dtype if part.dtype else None
    for part in (config, config.get_text_config()):
        if merged.apart:
            part.tie_word_embeddings = False
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    config.architectures = config.architectures or [architecture]
    config.save_pretrained(folder)
