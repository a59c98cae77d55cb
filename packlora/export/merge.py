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

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file

from packlora.adapters.files import read_trained_on, tensor_key
from packlora.adapters.kinds import PREFIX
from packlora.adapters.spec import AdapterSpec, ModuleSpec
from packlora.base.classes import ClassOf
from packlora.base.device import choose_device
from packlora.base.load import read_model, read_tokenizer
from packlora.base.own_tokenizer import own_template, own_tokenizer
from packlora.base.shape import vocabulary
from packlora.base.weight_files import INDEX, WeightFiles, keys_there, parts_of, turned_keys
from packlora.codes.dense_files import DequantisedFiles
from packlora.codes.load import check_quantization, dequantised, quantised_paths, read_quantised
from packlora.codes.stored import MADE, Stored, stored_as
from packlora.commands.adapter_folder import AdapterFolder, of_the_base, open_adapter
from packlora.config import QuantizationConfig
from packlora.data.template import templated
from packlora.errors import InputError, WriteError, foreign, quoted, unwritten
from packlora.export.as_served import as_trained, classes, compare, not_compared, told_apart, why_not
from packlora.export.merge_experts import ExpertPlace, expert_places
from packlora.export.requantise import asked_codes, requantise
from packlora.files import write_folder, write_json
from packlora.ops.row_norm.row_norm import row_norm

BESIDE = (
    "generation_config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "chat_template.json",
)  # fmt: skip
"""Files of a base that a merged model has as they are, where they are there: how it answers, and how it reads images."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


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
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not empty; choose another folder")
    codes = asked_codes(requantize)
    opened = open_adapter(adapter_dir, base_model)
    unchecked = why_not(check, opened)
    base, revision, skeleton = opened.base, opened.config.revision, opened.skeleton
    kept = skeleton.config.dtype or torch.float32
    with of_the_base():
        tokenizer, of_tokens = _tokenizer(opened)
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

    _write_out(out, write)
    folded = source.told(codes is None)
    rounded = merged.told() if codes is None else ""
    return "; ".join(text for text in (opened.note, of_tokens, folded, *made, rounded) if text) or None


def _tokenizer(opened: AdapterFolder) -> tuple[Any, str]:
    """The tokenizer of the merged model, and what to say of it: the base's, or the adapter's own where its folder has one."""
    tokenizer = read_tokenizer(opened.base, opened.config.revision)
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
    what = "the merged model"
    try:
        trained = as_trained(opened, lambda cls: source.load(opened, cls))
    except Exception as error:  # any code of a model; what is merged is not wrong for it
        return not_compared(what, f"the adapter does not run here ({foreign(error)})")
    served = {
        name: partial(read_model, str(folder), None, torch.float32, class_of=cls)
        for name, cls in classes(opened).items()
    }
    with told_apart(what):
        return compare(trained, served, what, merged.lost_share)


def _write_out(out: Path, write: Callable[[Path], None]) -> None:
    """The folder `out`, as a whole. Raises InputError or WriteError."""
    try:
        target = Path(os.path.realpath(out))  # a link stays, and what it leads to is written
        target.parent.mkdir(parents=True, exist_ok=True)
        write_folder(target, write)
    except (OSError, SafetensorError) as error:
        if reason := unwritten(error):
            raise WriteError(f"cannot write {out}: {reason}") from None
        raise InputError(f"cannot write {out}: {error}") from None


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
    made = dtype if told is None else _made_in(told, dtype, adapter_dir)
    return DequantisedFiles(base, revision, stored, made, choose_device("auto"))


def _made_in(told: Mapping[str, object], otherwise: torch.dtype, adapter_dir: Path) -> torch.dtype:
    """The dtype of the run that an adapter's file tells of. Raises InputError where it is none that a run has."""
    name = told.get("dtype")
    if name is None:
        return otherwise
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise InputError(
            f"{adapter_dir} says that it was trained in dtype {quoted(name)}; a run has float32, bfloat16, float16 or float64"
        )
    return getattr(torch, name)  # type: ignore[no-any-return]


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


@dataclass(slots=True)
class Codes:
    """Codes of the base's weights; the adapter is merged into their dequantised values.

    dtype: dtype of the run that made the codes. keys: keys of the files whose weights were quantised. error, size: sums of
    squares of the quantisation error, and of the weights.
    """

    quantization: QuantizationConfig
    dtype: torch.dtype
    keys: set[str] = field(default_factory=set)
    error: float = 0.0
    size: float = 0.0

    @staticmethod
    def of(adapter_dir: Path, asked: str, double_quant: bool, dtype: torch.dtype) -> Codes | None:
        """Codes as requested, or as the adapter's folder says. dtype: the base's. Raises InputError where there are no such
        codes."""
        told = read_trained_on(adapter_dir) if asked == "auto" else None
        try:
            if told is not None:
                dtype = _made_in(told, dtype, adapter_dir)
                found = QuantizationConfig(**{key: value for key, value in told.items() if key != "dtype"})
            elif asked in ("auto", "none"):
                return None
            else:
                found = QuantizationConfig(method=asked, double_quant=double_quant)  # type: ignore[arg-type]
        except (ValidationError, TypeError) as error:
            what = (
                f"{adapter_dir} says that its base was quantised by {quoted(told)}"
                if told is not None
                else f"--quantization {asked}"
            )
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise InputError(f"{what}: {reason}; give auto, none, nf4, fp4 or int8") from None
        what = "--quantization" if told is None else str(adapter_dir)
        if found.method not in MADE:
            raise InputError(
                f"{what}: {found.method} codes are not made here; give the base that is saved so, --base-model"
            )
        check_quantization(found, choose_device("auto"), what)
        return Codes(found, dtype)

    def stand_for(self, stored: torch.Tensor) -> torch.Tensor:
        """Float32."""
        made = dequantised(stored.to(choose_device("auto")), self.quantization, self.dtype).to(stored.device)
        self.error += float((made - stored.float()).square().sum())
        self.size += float(stored.float().square().sum())
        return made

    def told(self) -> str:
        return (
            f"the adapter is folded into what {self.quantization.described} codes of the base stand for, which is "
            f"{(self.error / max(self.size, 1e-300)) ** 0.5:.2%} off its weights (root mean square)"
        )


@dataclass(slots=True)
class Merged:
    """The weights of the merged model, as the base's files hold them.

    tensors: of the adapter, by the keys of its file. dtype: of what is written.
    """

    files: WeightFiles | DequantisedFiles
    spec: AdapterSpec
    tensors: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    adapter_dir: Path
    places: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Path of the adapted layer, and weight or bias, by the key of the files."""
    transposed: set[str] = field(default_factory=set)
    """Paths of layers whose weights lie transposed."""
    shared: str = ""
    """The key of the weight that embedding and output layer share in the files, where they do not any more."""
    untied: str = ""
    """The key of the second one then."""
    apart: bool = False
    """Whether they are not the same any more, whatever the files have."""
    experts: dict[str, ExpertPlace] = field(default_factory=dict)
    """Place in the adapted experts, by the key of the files."""
    codes: Codes | None = None
    """Codes whose dequantised values the adapter is merged into, if any."""
    lost: float = 0.0
    """Sum of squares of what rounding to dtype changes in adapted tensors."""
    added: float = 0.0
    """Sum of squares of the adapter's contribution to them."""

    @property
    def lost_share(self) -> float:
        """Root mean square of the change by rounding to 16 bits, as a share of the adapter's contribution."""
        return (self.lost / self.added) ** 0.5 if self.dtype.itemsize == 2 and self.added else 0.0

    def told(self) -> str:
        """Describe the loss by rounding to 16 bits; empty where nothing is rounded."""
        if self.dtype.itemsize > 2 or not self.added:
            return ""
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"merged weights are rounded to {name}, which changes them by {self.lost_share:.2%} of what the adapter adds "
            "(root mean square); --dtype float32 does not round"
        )

    def find(self, keys: Mapping[str, str], model: PreTrainedModel) -> None:
        """Find the adapted layers in the files. Embedding and output layer of the model, which has no weights, are untied where
        that is needed.

        Args:
            keys: keys by the model's names, see weight_files.keys_there.

        Raises:
            InputError: the weight of an adapted layer is computed from others while transformers loads it.
        """
        self._untie(keys, model)
        for path, module in self.spec.modules.items():
            if module.kind == "experts":
                continue
            if module.kind == "router":
                if path not in keys:
                    raise self._computed(path)
                self.places[keys[path]] = path, "weight"
                continue
            base = model.get_submodule(path)
            if module.kind == "convolution" and base.groups > 1:
                raise InputError(
                    f"{self.adapter_dir} adapts {path}, a convolution of {base.groups} groups: no one weight has its numbers, "
                    "as a filter sees one group and A sees all; the adapter can be used beside its base alone"
                )
            self.transposed |= {path} if type(base) is Conv1D else set()
            for leaf, _ in base.named_parameters(recurse=False):
                if (name := f"{path}.{leaf}") in keys:
                    self.places[keys[name]] = path, leaf
                elif name != self.untied and module.kind != "tied" and (leaf == "weight" or module.train_bias):
                    raise self._computed(name)

    def find_experts(self, keys: Mapping[str, str], model: PreTrainedModel) -> None:
        """Find the adapted experts in the files. Arguments and errors are those of `find`."""
        adapted = [path for path, module in self.spec.modules.items() if module.kind == "experts"]
        parts, turned = {}, {}
        if adapted and isinstance(self.files, WeightFiles):
            parts, turned = parts_of(model, self.files), turned_keys(model, self.files)
        for path in adapted:
            experts = model.get_submodule(path.rpartition(".")[0])
            found = expert_places(path, experts, keys, parts, turned)
            if not found:
                raise self._computed(path)
            self.experts |= found

    def _computed(self, name: str) -> InputError:
        return InputError(
            f"base_model {self.files.path!r}: {name}, which the adapter changes, is computed from other weights of "
            "the files; save_pretrained the base with save_original_format=False"
        )

    def _untie(self, keys: Mapping[str, str], model: PreTrainedModel) -> None:
        """Find out whether two tensors are written of the one that embedding and output layer share."""
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if head is None or head.weight is not embedding.weight:
            return
        paths = {id(module): path for path, module in model.named_modules(remove_duplicate=False)}
        outputs, inputs = paths[id(head)], paths[id(embedding)]
        own = self.spec.modules.get(outputs)
        if (own is None and inputs not in self.spec.modules) or (own is not None and own.kind == "tied"):
            return
        there = {f"{inputs}.weight", f"{outputs}.weight"} & keys.keys()
        if len(there) == 1:
            self.untied, self.shared = f"{outputs}.weight", keys[there.pop()]
            self.places[self.shared] = inputs, "weight"
        self.apart = True

    def write(self, folder: Path) -> None:
        """Write all files, one after the other. Raises InputError where a merged layer is not finite."""
        names = self.files.names
        size = 0
        for name, keys in names.items():
            tensors = {key: self._tensor(key) for key in keys}
            if self.shared in keys:
                tensors[self.untied] = self._tensor(self.shared, (self.untied.rpartition(".")[0], "weight"))
            size += sum(tensor.nbytes for tensor in tensors.values())
            save_file(tensors, folder / name, metadata={"format": "pt"})
            del tensors  # before the next ones are read
        if len(names) > 1:
            where = {key: name for name, keys in names.items() for key in keys}
            where |= {self.untied: where[self.shared]} if self.shared else {}
            write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": where})

    def _tensor(self, key: str, place: tuple[str, str] | None = None) -> torch.Tensor:
        """Merged value of a tensor of the files. place: path and leaf of the layer that it is read for; None: the tensor's
        own."""
        stored = self.files.read(key)
        if not stored.is_floating_point():
            return stored
        if self.codes is not None and key in self.codes.keys:
            stored = self.codes.stand_for(stored)
        if (at := self.experts.get(key)) is not None:
            name, exact = at.path, at.folded(stored, self.spec.modules[at.path], self.tensors)
        else:
            path, leaf = place or self.places.get(key, ("", ""))
            module = self.spec.modules.get(path)
            if module is None:
                return stored.float().to(self.dtype) if stored.dtype == torch.float64 else stored.to(self.dtype)
            name, exact = f"{path}.{leaf}", self._folded(stored, path, leaf, module)
        out = exact.to(self.dtype)
        if not out.isfinite().all():
            raise InputError(f"{self.adapter_dir}: merged, {name} is not finite in {self.dtype}")
        self.lost += float((out.float() - exact).square().sum())
        self.added += float((exact - stored.float()).square().sum())
        return out

    def _folded(self, stored: torch.Tensor, path: str, leaf: str, module: ModuleSpec) -> torch.Tensor:
        """A weight or a bias of an adapted layer with the adapter in it, float32."""

        def own(name: str) -> torch.Tensor:
            return self.tensors[tensor_key(path, name, module)].float()

        if module.kind == "copy":
            return self.tensors[f"{PREFIX}{module.stored_at or path}.{leaf}"].float()
        W = stored.float()
        if module.kind == "tokens":
            return W.index_copy(0, torch.tensor(module.tokens), own("tokens"))
        if leaf == "bias" and module.train_bias:
            return own("bias")
        if leaf == "bias" or not module.rank:
            return W
        turned = module.kind == "embedding" or path in self.transposed
        W, A, B = (W.T if turned else W).flatten(1), own("A").flatten(1), own("B").flatten(1)
        merged = W.addmm(B, A, alpha=module.scaling)
        if module.use_dora:
            magnitude = own("filter_magnitude" if module.kind == "convolution" else "magnitude").flatten()
            merged *= (magnitude / row_norm(W, A, B, module.scaling)).unsqueeze(1)
        return merged.T.contiguous() if turned else merged.view(stored.shape)
