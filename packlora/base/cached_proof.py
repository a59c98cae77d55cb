"""The proof that a packed model may be sampled from a cache of keys and values: token by token it has the logits that whole
rows have.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from packlora.base.kv_cache import Decode, KeyValueCache, Prefill, kept_in
from packlora.base.mixers import mixing_functions
from packlora.base.packing import packed_logits
from packlora.base.proof import PROBE_ERROR, PROBE_TOKENS, difference, probe
from packlora.base.rotary import depends_on_length
from packlora.errors import Unpackable
from packlora.ops.attention.cached import Visible
from packlora.ops.lora_linear.frozen import exact_products
from packlora.ops.wide import widened

TOKENS = 12
"""Tokens of a probe, where the model's attention has no short window."""
STEPS = 3
"""Tokens of a probe that are run one by one."""


def other_cache(model: PreTrainedModel) -> str | None:
    """Explain in words why a model's cache is more than keys and values of tokens, where its modules show that."""
    if names := sorted(name for _, name in mixing_functions(model)):
        return f"it mixes tokens by a recurrence or a convolution ({', '.join(names)})"
    if depends_on_length(model):
        return "its rotary embedding depends on how long a sequence is"
    if any(hasattr(module, "floor_scale") for module in model.modules()):
        return "its attention scales queries by their places"
    return None


@exact_products()
@torch.no_grad()
def own_probe(model: PreTrainedModel) -> torch.Tensor:
    """Logits [2 STEPS, V] of the last tokens of both probes, as transformers runs the untouched model."""
    return torch.cat([model(input_ids=ids[None], use_cache=False).logits[0, -STEPS:] for ids in _probes(model)])


@exact_products()
@torch.no_grad()
def why_not_cached(model: PreTrainedModel, own: torch.Tensor | None = None) -> str | None:
    """Explain in words why a model that is ready for packed rows cannot be sampled from such a cache; None: it can.

    Args:
        own: see own_probe; None compares with the model's own packed rows.
    """
    if (reason := other_cache(model)) is not None:
        return reason
    probes = _probes(model)
    lengths = [len(ids) - STEPS for ids in probes]
    cache = KeyValueCache()
    cache.resize(len(probes), max(map(len, probes)), {})
    try:
        if own is None:
            rows = torch.cat([torch.arange(-STEPS, 0) + sum(map(len, probes[: at + 1])) for at in range(len(probes))])
            own = _packed(model, probes, [*map(len, probes)], rows)
        starts = [sum(lengths[:at]) for at in range(len(lengths))]
        kept_N = [torch.tensor(kept, device=model.device) for kept in kept_in([[0], [1]], lengths, starts)]
        prompts = [ids[:n] for ids, n in zip(probes, lengths, strict=True)]
        _packed(model, prompts, Prefill(cache, tuple(lengths), *kept_N), torch.zeros(1, dtype=torch.int64))
        steps = [_step(model, cache, probes, [n + at for n in lengths]) for at in range(STEPS)]
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return str(error) if isinstance(error, Unpackable) else f"{type(error).__name__} ({error})".splitlines()[0]
    got = torch.cat([torch.stack([step[at] for step in steps]) for at in range(len(probes))])
    error_of = difference(widened(got), widened(own.to(got.device)), model.dtype)
    if error_of < PROBE_ERROR[model.dtype]:
        return None
    return f"token by token it has other logits than whole rows (they differ by {error_of:.1%})"


def _probes(model: PreTrainedModel) -> list[torch.Tensor]:
    """Two short samples, which leave a short attention window."""
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    length = TOKENS + (window if window <= PROBE_TOKENS else 0)
    return [probe(model, 5, length), probe(model, 6, length - 2)]


def _packed(
    model: PreTrainedModel, samples: list[torch.Tensor], how: list[int] | Prefill, rows_L: torch.Tensor
) -> torch.Tensor:
    positions = torch.cat([torch.arange(len(ids), device=model.device) for ids in samples])
    return packed_logits(model, torch.cat(samples), positions, how, rows_L.to(model.device))


def _step(model: PreTrainedModel, cache: KeyValueCache, probes: list[torch.Tensor], places: list[int]) -> torch.Tensor:
    """Logits [2, V] of the tokens at these places, in rows of the other order than the slots."""
    crossed, places_S = torch.tensor([1, 0], device=model.device), torch.tensor(places, device=model.device)
    ids_S = torch.stack([ids[place] for ids, place in zip(probes, places, strict=True)])
    how = Decode(cache, crossed, crossed, Visible(places_S, cache.length))
    return packed_logits(
        model, ids_S[crossed], places_S[crossed], how, crossed
    )  # the rows are those of the slots again
