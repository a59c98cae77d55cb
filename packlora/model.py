"""The frozen base model: loading it, and running it on packed samples.

Owns what packlora must know of transformers: model and tokenizer loading, the attention that keeps packed samples apart,
the device and the floating-point type. Adapters are put on by adapters/attach.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from packlora.config import Run
from packlora.demo_model import base_path
from packlora.errors import InputError
from packlora.liger import use_liger
from packlora.ops.attention import packed_attention

ATTENTION = "packlora"
"""Name under which packed attention is registered with transformers. It has no mask function, so no mask is built."""


PROBE_TOKENS = 48
PROBE_ERROR = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Relative difference of logits, packed against alone, by type: many times what rounding does, far less than a mistake."""


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sample_lengths: Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, h, T, D] -> [1, T, H, D].

    The base model is frozen, so its own attention dropout is not applied.
    """
    if sample_lengths is None:
        raise RuntimeError(
            f"{type(module).__name__} did not pass sample_lengths on to its attention, so packed samples would see each other"
        )
    if attention_mask is not None or query.shape[0] != 1 or not getattr(module, "is_causal", True):
        raise RuntimeError(f"{type(module).__name__}: packed attention takes one causal row without a mask")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return packed_attention(query[0], key[0], value[0], sample_lengths, scale, sliding_window, softcap)[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


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
    """Whether the logits are the output layer's alone, so that the loss need not hold them: see loss.py."""
    liger: list[str] = field(default_factory=list)
    """Parts of the model that liger-kernel runs."""
    kept_outputs: str | None = None
    """In words, which DoRA layers keep their outputs: adapters/attach.py."""


def choose_device(name: str) -> torch.device:
    """auto is the current GPU if there is one; a numbered one becomes the current one, where kernels of anybody start. Raises
    InputError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device: {name!r} is not a device; use auto, cpu, cuda or cuda:<number>") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device: {name!r} is not supported; use auto, cpu, cuda or cuda:<number>")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise InputError(f"device: {name!r} is not there; this machine has {torch.cuda.device_count()} usable GPUs")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def _load(what: str, path: str, load: Any) -> Any:
    try:
        return load()
    except Exception as error:  # transformers raises many types for a model that is not there
        kind = "folder" if Path(path).is_dir() else "hub id, or folder that does not exist"
        first_line = str(error).strip().split("\n")[0]
        raise InputError(f"base_model {path!r} ({kind}): cannot load the {what}: {first_line}") from None


def load_tokenizer(run: Run) -> Any:
    """The tokenizer of the base model. Raises InputError when there is none."""
    path = base_path(run.base_model)
    return _load(
        "tokenizer",
        path,
        lambda: AutoTokenizer.from_pretrained(path, revision=run.revision, trust_remote_code=run.trust_remote_code),
    )


def load_skeleton(run: Run) -> PreTrainedModel:
    """The model without weights (meta device): enough to find layers and count parameters."""
    path = base_path(run.base_model)
    config = _load(
        "configuration",
        path,
        lambda: AutoConfig.from_pretrained(path, revision=run.revision, trust_remote_code=run.trust_remote_code),
    )
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(f"base_model {path!r} is quantised; this version trains on float bases only")
    with torch.device("meta"):
        model = _load(
            "model",
            path,
            lambda: AutoModelForCausalLM.from_config(
                config,
                trust_remote_code=run.trust_remote_code,
                attn_implementation="eager",  # a configuration may name one that is code on the hub
            ),
        )
    assert isinstance(model, PreTrainedModel)
    return model


def load_base(run: Run, tokenizer: Any) -> Base:
    """Load the base model for packed training: frozen, on its device, in the run's dtype."""
    path, device = base_path(run.base_model), choose_device(run.device)
    transformers.utils.logging.disable_progress_bar()
    model = _load(
        "model",
        path,
        lambda: AutoModelForCausalLM.from_pretrained(
            path,
            revision=run.revision,
            dtype=getattr(torch, run.dtype),
            trust_remote_code=run.trust_remote_code,
            attn_implementation="eager",
            use_safetensors=True,  # the other format is a pickle
        ),
    )
    model.to(device)
    own_logits = _own_logits(model)
    notes = prepare_model(model, run.gradient_checkpointing)
    replaced = use_liger(model, run.liger)
    fused_loss = _check_packing(model, own_logits, path)
    return Base(model, tokenizer, device, path, notes, fused_loss, replaced)


def prepare_model(model: PreTrainedModel, gradient_checkpointing: bool) -> list[str]:
    """Make a model run packed samples, frozen and without randomness of its own. Returns what the user should know."""
    notes = []
    model.requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    model.eval()
    if _drop_dropout(model):
        notes.append("the base model's own dropout is off: it is frozen, and only lora_dropout is applied")
    if gradient_checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # these checkpoint only in training mode; everything else stays in evaluation mode
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer) or getattr(module, "gradient_checkpointing", False):
                module.training = True
    return notes


def _drop_dropout(model: PreTrainedModel) -> bool:
    """Set every dropout rate that a module or a configuration holds to 0; True if there was one."""
    found = False
    for owner in [
        *model.modules(),
        *{id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values(),
    ]:
        for name, value in list(vars(owner).items()):
            rate = isinstance(owner, torch.nn.Dropout) and name == "p"
            if (rate or "dropout" in name) and isinstance(value, float) and value > 0:
                setattr(owner, name, 0.0)
                found = True
    return found


# --- may this model be packed? -----------------------------------------------------------------------------------------


def _probe(model: PreTrainedModel, seed: int) -> torch.Tensor:
    """A sample of random tokens, long enough to leave a short attention window."""
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    length = PROBE_TOKENS + (window if window <= PROBE_TOKENS else 0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).to(model.device)


@torch.no_grad()
def _own_logits(model: PreTrainedModel) -> torch.Tensor:
    """Logits of the second probe alone, by the model as transformers runs it."""
    model.eval()
    return model(input_ids=_probe(model, 2)[None], use_cache=False).logits[0].double()  # type: ignore[no-any-return]


@torch.no_grad()
def _check_packing(model: PreTrainedModel, own_logits: torch.Tensor, path: str) -> bool:
    """Refuse a model that packed attention does not serve: most such models would run, and train something else.

    Two samples are packed, three times; the first one is another one the third time. The second one must always have the
    same bits, and the logits that the untouched model gives it alone.

    Returns:
        Whether the output layer on the decoder's hidden states gives these logits too, to the bit. It does not where a
        model scales or caps its logits, or treats the hidden states first.

    Raises:
        InputError: the model mixes tokens outside its attention (convolutions, recurrences, position biases), its attention
            is not causal softmax attention with an optional window or cap, or it draws random numbers.
    """
    second = _probe(model, 2)
    outputs = []
    for seed in (1, 1, 3):
        first = _probe(model, seed)
        ids, lengths = torch.cat([first, second]), (len(first), len(second))
        positions = torch.cat([torch.arange(length) for length in lengths]).to(model.device)
        rows = torch.arange(len(first), len(ids), device=model.device)
        try:
            outputs.append(packed_logits(model, ids, positions, lengths, rows).double())
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"base_model {path!r}: a {model.config.model_type} model cannot be packed: {error}"
            ) from None
    what = f"base_model {path!r}: packlora cannot train a {model.config.model_type} model: "
    if not torch.equal(outputs[0], outputs[1]):
        raise InputError(what + "it gives other numbers every time it is run, so it draws random numbers of its own")
    if outputs[0].shape != own_logits.shape or not torch.equal(outputs[0], outputs[2]):
        raise InputError(what + "samples that are packed together see each other")
    difference = float((outputs[0] - own_logits).norm() / own_logits.norm())
    if not difference < PROBE_ERROR[model.dtype]:
        raise InputError(what + f"its attention is of another kind (its own logits differ by {difference:.1%})")
    head = plain_head(model)
    if head is None:
        return False
    try:
        hidden = packed_hidden(model, ids, positions, lengths, rows)
        return torch.equal(torch.nn.functional.linear(hidden[None], head.weight, head.bias)[0].double(), outputs[2])
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False  # a model that cannot be run without its output layer


def packed_logits(
    model: PreTrainedModel,
    input_ids_T: torch.Tensor,
    position_ids_T: torch.Tensor,
    sample_lengths: Sequence[int],
    rows_L: torch.Tensor,
) -> torch.Tensor:
    """Logits [L, V] at the chosen rows of packed samples. Only those rows go through the output layer.

    use_cache is off and no attention mask is given: either would let transformers build its own idea of the packing.
    """
    output = model(
        input_ids=input_ids_T[None],
        position_ids=position_ids_T[None],
        use_cache=False,
        logits_to_keep=rows_L,
        sample_lengths=tuple(sample_lengths),
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def packed_hidden(
    model: PreTrainedModel,
    input_ids_T: torch.Tensor,
    position_ids_T: torch.Tensor,
    sample_lengths: Sequence[int],
    rows_L: torch.Tensor,
) -> torch.Tensor:
    """What the output layer is given for packed_logits, [L, D]. Only for a model whose output layer comes last: fused_loss."""
    output = model.base_model(
        input_ids=input_ids_T[None],
        position_ids=position_ids_T[None],
        use_cache=False,
        sample_lengths=tuple(sample_lengths),
    )
    hidden: torch.Tensor = output.last_hidden_state[0, rows_L]
    return hidden


def plain_head(model: PreTrainedModel) -> torch.nn.Linear | None:
    """The output layer, if it is a frozen linear layer that carries no adapter."""
    head = model.get_output_embeddings()
    frozen = type(head) is torch.nn.Linear and not any(parameter.requires_grad for parameter in head.parameters())
    return head if frozen else None
