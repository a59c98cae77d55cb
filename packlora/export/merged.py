"""Weights of a merged model, as they are read, merged and written, shard by shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from packlora.adapters.files import tensor_key
from packlora.adapters.kinds import is_routed, routed, suffixes
from packlora.adapters.reading import read_trained_on
from packlora.adapters.spec import AdapterSpec, ModuleSpec
from packlora.base.device import choose_device
from packlora.base.held import INDEX
from packlora.base.weight_files import WeightFiles, parts_of, turned_keys
from packlora.codes.dense_files import DequantisedFiles
from packlora.codes.load import check_quantization, dequantised
from packlora.codes.stored import MADE
from packlora.config import QuantizationConfig
from packlora.errors import InputError, quoted
from packlora.export.merge_experts import ExpertPlace, expert_places
from packlora.files import write_json
from packlora.ops.row_norm.row_norm import row_norm


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
                dtype = made_in(told, dtype, adapter_dir)
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
            if is_routed(module.kind) and (reason := routed(module.kind).why_not_merged(base)):
                raise InputError(f"{self.adapter_dir} adapts {path}, {reason}")
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

        W, kind = stored.float(), routed(module.kind) if is_routed(module.kind) else None
        if kind is not None and (whole := kind.replaced(W, leaf, module, own)) is not None:
            return whole  # type: ignore[no-any-return]
        if leaf == "bias" and module.train_bias:
            return own("bias")
        if leaf == "bias" or not module.rank:
            return W
        turned = path in self.transposed or (kind is not None and kind.is_turned)
        W, A, B = (W.T if turned else W).flatten(1), own("A").flatten(1), own("B").flatten(1)
        merged = W.addmm(B, A, alpha=module.scaling)
        if module.use_dora:
            magnitude = own(next(name for name in suffixes(module.kind) if name.endswith("magnitude"))).flatten()
            merged *= (magnitude / row_norm(W, A, B, module.scaling)).unsqueeze(1)
        return merged.T.contiguous() if turned else merged.view(stored.shape)


def made_in(told: Mapping[str, object], otherwise: torch.dtype, adapter_dir: Path) -> torch.dtype:
    """The dtype of the run that an adapter's file tells of. Raises InputError where it is none that a run has."""
    name = told.get("dtype")
    if name is None:
        return otherwise
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise InputError(
            f"{adapter_dir} says that it was trained in dtype {quoted(name)}; a run has float32, bfloat16, float16 or float64"
        )
    return getattr(torch, name)  # type: ignore[no-any-return]
