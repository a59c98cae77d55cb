"""Adapters that clients ask for: from a request's lora_config and user_metadata to a specification on the base model."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from packlora.adapters.names import resolve
from packlora.adapters.spec import AdapterSpec
from packlora.adapters.starts import check_starts
from packlora.config import AdapterConfig
from packlora.config.peft import peft_config
from packlora.errors import InputError, quoted
from packlora.serve.errors import Refused
from packlora.serve.limits import Limits

ALPHA = 32.0
PARTS = ("train_attn", "train_mlp", "train_unembed")
OURS = (
    "lora_alpha", "lora_dropout", "use_dora", "dora_dropout", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern",
    "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights",
)  # fmt: skip
"""Keys of user_metadata.packlora: what the protocol cannot say. Names and meanings are those of a run file's adapter."""
METADATA = "user_metadata.packlora"


@dataclass(frozen=True, slots=True)
class Wanted:
    """An adapter as it was asked for: a run file's adapter, the protocol's three switches, and the seed of its first values."""

    adapter: Mapping[str, Any]
    parts: Mapping[str, bool]
    seed: int

    @property
    def rank(self) -> int:
        return int(self.adapter["r"])

    def as_dict(self) -> dict[str, Any]:
        return {"adapter": dict(self.adapter), "parts": dict(self.parts), "seed": self.seed}

    @staticmethod
    def of_dict(tree: Mapping[str, Any]) -> Wanted:
        return Wanted(tree["adapter"], tree["parts"], tree["seed"])

    def spec(self, skeleton: PreTrainedModel, path: str) -> AdapterSpec:
        """Resolve it on a model without weights. path: of the base model. Raises Refused, in words."""
        try:
            adapter = AdapterConfig.model_validate(self._with_targets(skeleton))
            spec = resolve(peft_config(adapter, path, None), skeleton, "model")
            spec.with_base_dropped(adapter.dora_dropout == "peft")
            if spec.of_weights:
                check_starts(spec, skeleton, "model")
        except ValidationError as error:
            first = error.errors()[0]
            raise Refused(f"{METADATA}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        except InputError as error:
            raise Refused(str(error).removeprefix("job 'model': ")) from None
        return spec

    def _with_targets(self, skeleton: PreTrainedModel) -> dict[str, Any]:
        if "target_modules" in self.adapter:
            return dict(self.adapter)
        if not any(self.parts.values()):
            raise Refused(
                "lora_config: train_attn, train_mlp and train_unembed are all false; there is nothing to train"
            )
        return {**self.adapter, "target_modules": _targets(skeleton, self.parts)}


def _targets(skeleton: PreTrainedModel, parts: Mapping[str, bool]) -> list[str]:
    """Linear layers of the parts that are trained, by path."""
    head, found = skeleton.get_output_embeddings(), list[str]()
    for path, module in skeleton.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        is_attention = any("attn" in name or "attention" in name for name in path.split("."))
        part = "train_unembed" if module is head else "train_attn" if is_attention else "train_mlp"
        if parts[part]:
            found.append(path)
    return found


def wanted(lora: Any, metadata: Any, limits: Limits) -> Wanted:
    """Read lora_config and user_metadata of create_model. Raises Refused, which names the field."""
    if lora is None:
        raise Refused("lora_config: full fine-tuning is not served; give a rank: create_lora_training_client")
    if not isinstance(lora, Mapping):
        raise Refused(f"lora_config: {quoted(lora)} is no object")
    rank, seed = lora.get("rank"), lora.get("seed")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= limits.rank:
        raise Refused(f"lora_config.rank: {quoted(rank)} is no whole number from 1 to the limit rank of {limits.rank}")
    if seed is not None and (not _is_int(seed) or not 0 <= seed < 2**63):
        raise Refused(f"lora_config.seed: {quoted(seed)} is no whole number from 0 on")
    parts = {name: lora.get(name, True) for name in PARTS}
    for name, value in parts.items():
        if not isinstance(value, bool):
            raise Refused(f"lora_config.{name}: {quoted(value)} is neither true nor false")
    adapter = {"r": rank, "lora_alpha": ALPHA, "lora_dropout": 0.0, **_ours(metadata)}
    for name, own in (adapter.get("rank_pattern") or {}).items():
        if not _is_int(own) or not 1 <= own <= limits.rank:
            raise Refused(f"{METADATA}.rank_pattern: {quoted(name)} has {quoted(own)}; ranks are 1 to {limits.rank}")
    return Wanted(adapter, parts, secrets.randbits(31) if seed is None else seed)


def _ours(metadata: Any) -> Mapping[str, Any]:
    own = metadata.get("packlora") if isinstance(metadata, Mapping) else None
    if isinstance(own, str):
        try:
            own = json.loads(own)
        except (ValueError, RecursionError):
            raise Refused(f"{METADATA}: a text that is no JSON; give an object, or its JSON") from None
    if own is None:
        return {}
    if not isinstance(own, Mapping):
        raise Refused(f"{METADATA}: {quoted(own)} is no object")
    for key in own:
        if key not in OURS:
            raise Refused(f"{METADATA}: {quoted(key)} is no key of it; it has {', '.join(OURS)}")
    if isinstance(own.get("rank_pattern") or {}, Mapping):
        return own
    raise Refused(f"{METADATA}.rank_pattern: {quoted(own['rank_pattern'])} is no object")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
