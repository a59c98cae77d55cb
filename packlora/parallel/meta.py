"""Running a model without weights, to see how its parts are called.

Without weights no token has an expert: experts give what they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from packlora.adapters.expert_layout import is_experts
from packlora.adapters.owners import MIN_ROWS
from packlora.base.packing import ATTENTION
from packlora.errors import InputError, foreign
from packlora.ops.modules import undisturbed


def run_on_meta(model: PreTrainedModel, hooks: Sequence[RemovableHandle], what: str) -> None:
    """Run the model on the meta device, with gradients of nothing, under hooks that are removed then; it leaves no trace.

    Raises:
        InputError: the model cannot be run so; `what` names it.
    """
    try:
        _run(model)
    except Exception as error:  # any model, any error
        raise InputError(f"{what} cannot be looked at without weights: {foreign(error)}") from None
    finally:
        for hook in hooks:
            hook.remove()


def _run(model: PreTrainedModel) -> None:
    tensors = {
        name: torch.empty_like(tensor, device="meta", requires_grad=False)
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    }
    ids = torch.zeros(1, MIN_ROWS, dtype=torch.int64, device="meta")
    example = {"input_ids": ids, "position_ids": ids, "use_cache": False, "sample_lengths": (MIN_ROWS,)}
    attention = model.config._attn_implementation
    experts = [module for module in model.modules() if is_experts(module)]
    text = model.config.get_text_config()
    with_loss = getattr(text, "output_router_logits", None)  # of routers, which counts tokens
    pad = getattr(model.config, "pad_token_id", None)  # which some models look for in the ids, to warn of it
    with undisturbed(model), torch.enable_grad():
        for module in experts:
            vars(module)["forward"] = _itself
        if with_loss:
            text.output_router_logits = False
        if pad is not None:
            model.config.pad_token_id = None
        model.set_attn_implementation(ATTENTION)  # which needs no mask, whose values would be asked for
        try:
            torch.func.functional_call(model, tensors, (), example, tie_weights=False)
        finally:
            if with_loss:
                text.output_router_logits = with_loss
            if pad is not None:
                model.config.pad_token_id = pad
            model.set_attn_implementation(attention)
            for module in experts:
                del vars(module)["forward"]


def _itself(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_states.clone()
