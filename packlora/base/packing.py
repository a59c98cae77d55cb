"""Running a base model on packed samples: several samples in one row, none of which sees another.

Owns the attention that packed rows go through, what is changed in a model for it, and the two calls that run it. proof.py
shows whether a model may be run so.

Shapes: T tokens of the row, L rows of it that are kept, H heads of queries, h of keys and values, D width, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from packlora.base.mixers import mix_by_sample
from packlora.base.rotary import rotate_by_sample
from packlora.base.shape import attention_of_text, fast_towers, scaled_by_place
from packlora.errors import Unpackable
from packlora.ops.attention.attention import packed_attention
from packlora.ops.attention.blocks import SampleBlocks

ATTENTION = "packlora"
"""Name under which packed attention is registered with transformers. It has no mask function, so no mask is built."""
DECODER = "packed_decoder"
"""A method that a model may have: it runs the decoder without the output layer, whose weight is here when it returns."""


class CachedPass:
    """A pass over a cache of keys and values (kv_cache.py), in the place of sample lengths."""

    __slots__ = ()

    def attend(
        self, module: torch.nn.Module, q_HTD: torch.Tensor, k_hTD: torch.Tensor, v_hTD: torch.Tensor, scale: float,
        window: int | None, softcap: float | None, sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention [T, H, D] of the row's tokens, whose keys and values the cache keeps."""
        raise NotImplementedError


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
    sample_lengths: Sequence[int] | SampleBlocks | CachedPass | None = None,
    image_blocks: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, h, T, D] -> [1, T, H, D].

    The base model is frozen, so its own attention dropout is not applied.
    """
    if sample_lengths is None:
        raise Unpackable(
            f"{type(module).__name__} did not pass sample_lengths on to its attention, so packed samples would see each other"
        )
    if attention_mask is not None or query.shape[0] != 1 or not getattr(module, "is_causal", True):
        raise Unpackable(f"{type(module).__name__}: packed attention takes one causal row without a mask")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # squeezed, not indexed: the gradient of an index is a tensor of zeros with a copy in it, laid out as nobody wants it
    q, k, v = query.squeeze(0), key.squeeze(0), value.squeeze(0)
    if isinstance(sample_lengths, CachedPass):
        if image_blocks is not None:
            raise Unpackable(f"{type(module).__name__}: tokens that see later ones are not sampled from a cache")
        return sample_lengths.attend(module, q, k, v, scale, sliding_window, softcap, s_aux)[None], None
    return packed_attention(q, k, v, sample_lengths, scale, sliding_window, softcap, image_blocks, s_aux)[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


def prepare_model(model: PreTrainedModel, gradient_checkpointing: bool) -> list[str]:
    """Make a model run packed samples, frozen and without randomness of its own. Returns what the user should know."""
    notes = []
    model.requires_grad_(False)
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        model.config.get_text_config().output_router_logits = False  # asked for where a job has a loss of them
    model.set_attn_implementation(attention_of_text(model, ATTENTION))
    fast_towers(model)
    model.eval()
    rotate_by_sample(model)
    mix_by_sample(model)
    for module in scaled_by_place(model).values():
        module.attn_temperature_tuning = False  # a factor of 1 up to the length that load_base allows
    if _drop_dropout(model):
        notes.append("the base model's own dropout is off: it is frozen, and only lora_dropout is applied")
    if noises := _noises(model.config):
        notes.append(
            f"the base model's own randomness in training is off: it is frozen, and runs as it answers ({noises})"
        )
    if gradient_checkpointing:
        checkpoint_layers(model)
    return notes


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Let the layers of a model compute their activations again in the backward, from now on; no number changes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # nothing random is computed again: the model's own dropout is off, and masks of adapters have keys
        how = {"use_reentrant": False, "preserve_rng_state": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    # these checkpoint only in training mode; everything else stays in evaluation mode
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) or getattr(module, "gradient_checkpointing", False):
            module.training = True


def _drop_dropout(model: PreTrainedModel) -> bool:
    """Set every dropout rate that a module or a configuration holds to 0; True if there was one."""
    found = False
    for owner in [
        *model.modules(),
        *{id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values(),
    ]:
        for name, value in list(vars(owner).items()):
            rate = isinstance(owner, torch.nn.Dropout) and name == "p"
            if (rate or "drop" in name) and isinstance(value, float) and value > 0:
                setattr(owner, name, 0.0)
                found = True
    return found


def _noises(config: Any) -> str:
    """Keys of a configuration that ask for noise in routers in training. Models draw none in evaluation, as here; the values
    stay, as Phi-MoE's router reads its own in evaluation too."""
    found: dict[str, float] = {}
    pending = [config.to_dict()]
    while pending:
        for key, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif "jitter" in str(key) and isinstance(value, int | float) and value:
                found[str(key)] = value
    return ", ".join(f"{key} {value}" for key, value in sorted(found.items()))


def packed_logits(
    model: PreTrainedModel,
    input_ids_T: torch.Tensor,
    position_ids_T: torch.Tensor,
    sample_lengths: Sequence[int] | CachedPass,
    rows_L: torch.Tensor,
    images: Mapping[str, torch.Tensor] | None = None,
    routed: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Logits [L, V] at the chosen rows of packed samples. Only those rows go through the output layer.

    use_cache is off and no attention mask is given: either would let transformers build its own idea of the packing.

    Args:
        input_ids_T, position_ids_T: int64 [T]; positions begin at 0 in every sample. Positions may be [3, T].
        sample_lengths: tokens of each sample, in the order of the row; their sum is T. Or a pass over a cache (kv_cache.py).
        rows_L: int64 [L], places in the row.
        images: more of the model's keyword arguments, where samples have images.
        routed: gets what the routers of all layers give, [T, E] each; None where nobody wants it.
    """
    output = model(
        input_ids=input_ids_T[None],
        position_ids=one_row(position_ids_T),
        use_cache=False,
        logits_to_keep=rows_L,
        sample_lengths=sample_lengths if isinstance(sample_lengths, CachedPass) else tuple(sample_lengths),
        **_more(images, routed),
    )
    _take_routed(output, routed)
    logits: torch.Tensor = output.logits[0]
    return logits


def _more(images: Mapping[str, torch.Tensor] | None, routed: list[torch.Tensor] | None) -> dict[str, Any]:
    """More of a model's keyword arguments."""
    return dict(images or {}) | ({} if routed is None else {"output_router_logits": True})


def _take_routed(output: Any, routed: list[torch.Tensor] | None) -> None:
    if routed is not None:
        if not output.router_logits:
            raise Unpackable("the model does not give what its routers compute")
        routed += output.router_logits


def one_row(position_ids: torch.Tensor) -> torch.Tensor:
    """Positions [T] or [3, T] of a row as models take those of a batch of one."""
    return position_ids[None] if position_ids.ndim == 1 else position_ids[:, None]


def packed_hidden(
    model: PreTrainedModel,
    input_ids_T: torch.Tensor,
    position_ids_T: torch.Tensor,
    sample_lengths: Sequence[int],
    rows_L: torch.Tensor,
    images: Mapping[str, torch.Tensor] | None = None,
    routed: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Inputs of the output layer for packed_logits, [L, D]. Works only for a model whose output layer comes last:
    fused_loss."""
    return hidden_states(model, input_ids_T, position_ids_T, tuple(sample_lengths), images, routed)[rows_L]


def decoder_of(model: PreTrainedModel) -> Any:
    """Module that returns the hidden states, without the output layer; the model itself where it is not known."""
    found = getattr(model, DECODER, model.base_model)
    if found is not model:
        return found
    if hasattr(model, "model"):  # Llama4ForCausalLM, whose base_model_prefix is not the name of its attribute
        return model.model
    # Llama4ForConditionalGeneration has no model under its output layer that takes images; its decoder takes texts alone
    inner = model.get_decoder()
    return model if inner is model else decoder_of(inner)


def hidden_states(
    model: PreTrainedModel, input_ids_T: torch.Tensor, position_ids_T: torch.Tensor, samples: tuple[int, ...] | SampleBlocks,
    images: Mapping[str, torch.Tensor] | None = None, routed: list[torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Hidden states of all tokens, [T, D]; samples: their lengths, or their blocks; routed: see packed_logits."""
    output = decoder_of(model)(
        input_ids=input_ids_T[None], position_ids=one_row(position_ids_T), use_cache=False, sample_lengths=samples,
        **_more(images, routed),
    )  # fmt: skip
    _take_routed(output, routed)
    hidden: torch.Tensor = output.last_hidden_state.squeeze(0)
    return hidden
