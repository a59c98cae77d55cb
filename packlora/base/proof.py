"""The proof that a base model may be packed: packed probes must have the logits that the untouched model gives each one alone.

It runs once, when a model is loaded: `own_logits` before the model is prepared for packing, `check_packing` after. Short
probes go through the whole model, one as long as the longest sample of the run through its first layers, as many as show all
kinds that it has.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from packlora.base.layer_kinds import first_layers, layers_of_each_kind
from packlora.base.masks import OWN_MASKS, MaskLimits
from packlora.base.packing import hidden_states, packed_logits
from packlora.base.shape import attention_of_text, plain_head, scaled_by_place, vocabulary
from packlora.errors import InputError, plural
from packlora.ops.lora_linear.frozen import exact_products
from packlora.ops.wide import widened

PROBE_TOKENS = 48
PROBE_ERROR = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Relative difference of logits, packed against alone, by type: many times what rounding does, far less than a mistake."""


@dataclass(slots=True)
class OwnLogits:
    """Logits of the model as transformers runs it; the packed model is compared with them.

    Logits are float64 [T, V], T tokens of the probe.
    """

    second: torch.Tensor
    """Logits of the second probe by itself."""
    late: torch.Tensor
    """Logits of the first probe at the last positions that samples reach."""
    long: tuple[torch.Tensor, torch.Tensor] | None
    """Logits of the last tokens of a sample as long as the longest, and of the second probe, from the first layers only; None
    where the probes are as long."""
    layers: int | None
    """Number of first layers that were run; None: all."""
    limits: dict[str, int]
    """Tokens up to which layers can be packed, by name."""


@exact_products()
@torch.no_grad()
def own_logits(
    model: PreTrainedModel, path: str, longest: Mapping[str, int], everywhere: Callable[[list[str]], list[str]] = list,
    is_whole: bool = True,
) -> OwnLogits:  # fmt: skip
    """Run the untouched model on each probe alone.

    Args:
        is_whole: it lies in this process, so that layers can be left out.
        everywhere: names of weights, of all processes that have different ones, from those here; all call it.

    Raises:
        InputError: it does not give numbers.
    """
    model.eval()
    second, first = probe(model, 2), probe(model, 1)
    start, tokens = _late_start(longest, len(first)), max(longest.values(), default=0)
    limits = {
        name: module.floor_scale - 1 for name, module in scaled_by_place(model).items() if module.floor_scale <= tokens
    }
    found, long = MaskLimits({id(module): name for name, module in model.named_modules()}, limits), None
    layers = layers_of_each_kind(model) if is_whole and tokens > len(first) else None
    with cannot_be_packed(model, path, "is not run by transformers itself"):
        alone = _logits(model, second)
        _check_finite(model, alone, path, everywhere)
    with cannot_be_packed(model, path):
        if tokens > len(first):
            rows = torch.arange(tokens - len(first), tokens, device=model.device)
            with first_layers(model, layers):
                short = _logits(model, second)  # first: frequencies may keep what a long sample made them
                model.set_attn_implementation(attention_of_text(model, OWN_MASKS))
                long = _logits(model, probe(model, 4, tokens), own_masks=found, logits_to_keep=rows), short
            model.set_attn_implementation(attention_of_text(model, "eager"))
    positions = start + torch.arange(len(first), device=model.device)
    with cannot_be_packed(model, path, f"is not run by transformers at positions up to {start + len(first) - 1}"):
        late = _logits(model, first, position_ids=positions[None])
    return OwnLogits(alone, late, long, layers, found.limits)


@exact_products()
@torch.no_grad()
def check_packing(
    model: PreTrainedModel,
    own: OwnLogits,
    path: str,
    longest: Mapping[str, int],
    notes: list[str],
    crosses: Callable[[Pack, int], bool] | None = None,
) -> bool:
    """Refuse a model that packed attention does not serve: most such models would run, and train something else.

    Two samples are packed, three times; the first one, at late positions, is another one once. Then, by the first layers, the
    second one behind a sample as long as the longest of the run. Each must have the logits that the untouched model gives it
    alone.

    Args:
        crosses: as gradient_crosses, where each process has some of the layers, and the last one the output layer; all run the
            model as often, without gradients, and are told the same.

    Returns:
        Whether the output layer on the decoder's hidden states gives these logits too, to the bit. It does not where a
        model scales or caps its logits, or treats the hidden states first.

    Raises:
        InputError: the model mixes tokens outside its attention (convolutions, recurrences, position biases), its attention
            is not causal softmax attention with an optional window or cap, also not so at the length of the run's samples,
            or it draws random numbers.
    """
    second = probe(model, 2)
    n = len(second)
    pack, other = (Pack.of([probe(model, seed), second], [_late_start(longest, n), 0]) for seed in (1, 3))
    with cannot_be_packed(model, path):
        given, beside = pack.logits(model), other.logits(model)
        same_bits = torch.equal(given[n:], beside[n:])
        apart = same_bits or not (crosses or partial(gradient_crosses, model))(other, n)
        by_head = _gives_by_head(model, pack, given, crosses is not None)
        again = given if by_head and crosses is None else pack.logits(model)
    what = f"base_model {path!r}: packlora cannot train a {model.config.model_type} model: "
    if not torch.equal(given, again):
        raise InputError(what + "it gives other numbers every time it is run, so it draws random numbers of its own")
    if not apart or given[n:].shape != own.second.shape:
        runs = partial(pack.logits, model), partial(other.logits, model)
        where = "" if crosses is not None else _diagnosis().where_samples_meet(model, runs, n)
        raise InputError(f"{what}samples that are packed together see each other{where}")
    if not same_bits:
        notes.append("the rounding of the model's experts depends on all samples of a microbatch, and so on other jobs")
    _check_limits(model, own.limits, path, longest)
    pairs = [(given[:n], own.late), (given[n:], own.second), (beside[n:], own.second)]
    if own.long is not None:
        long = Pack.of([probe(model, 4, max(longest.values())), second], [0, 0])
        with cannot_be_packed(model, path), first_layers(model, own.layers):
            behind = long.logits(model)
        pairs += zip((behind[:n], behind[n:]), own.long, strict=True)
    errors = [difference(got, want.to(got), model.dtype) for got, want in pairs]
    if not max(errors) < PROBE_ERROR[model.dtype]:
        raise InputError(what + (_places(model, second, own) or _what_differs(errors, longest, n, model.dtype)))
    return by_head


def _places(model: PreTrainedModel, ids_T: torch.Tensor, own: OwnLogits) -> str | None:
    """See diagnosis.of_places."""
    n = len(ids_T)

    def packed(places_T: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(n, device=ids_T.device)
        return widened(packed_logits(model, ids_T, places_T.to(ids_T.device), (n,), rows))

    def is_own(logits: torch.Tensor) -> bool:
        return difference(logits, own.second.to(logits), model.dtype) < PROBE_ERROR[model.dtype]

    try:
        found: str | None = _diagnosis().of_places(packed, n, is_own)
        return found
    except (RuntimeError, ValueError, LookupError):  # places beyond a table of embeddings
        return None


def _diagnosis() -> ModuleType:
    """The module that finds reasons, imported where a model is refused."""
    from packlora.base import diagnosis

    return diagnosis


def _what_differs(errors: Sequence[float], longest: Mapping[str, int], n: int, dtype: torch.dtype) -> str:
    """Describe the difference in words. errors: of logits at late positions, of two short samples, and of a long sample and the
    one after it."""
    late, second, beside, *long = errors
    most, bound = max(longest.values(), default=n), PROBE_ERROR[dtype]
    by = f"(its own logits differ by {max(errors):.1%})"
    if max(second, beside) < bound and not late < bound:
        return f"at positions up to {most} it computes something else on a packed row {by}"
    if max(second, beside, late) < bound and long:
        return f"its attention in samples of {most} tokens is of another kind {by}"
    return f"its attention is of another kind {by}"


def _gives_by_head(model: PreTrainedModel, pack: Pack, logits: torch.Tensor, in_step: bool) -> bool:
    """Whether the output layer on the decoder's hidden states gives these logits, which are the pack's, to the bit."""
    head = plain_head(model)
    if head is None and not in_step:
        return False
    try:
        hidden_TD = hidden_states(model, *pack.inputs[:3])
        return head is not None and torch.equal(widened(head(hidden_TD[pack.inputs[3]][None])[0]), logits)
    except (AttributeError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
        return False  # a model that cannot be run without its output layer


def _logits(model: PreTrainedModel, ids_T: torch.Tensor, **more: Any) -> torch.Tensor:
    """Logits of one sample as transformers runs it, float64 [T, V]."""
    logits: torch.Tensor = model(input_ids=ids_T[None], use_cache=False, **more).logits[0]
    return widened(logits)


@dataclass(frozen=True, slots=True)
class Pack:
    """Probes in one row. inputs: of packed_logits; of each probe as many last tokens are kept as the last one has."""

    inputs: tuple[torch.Tensor, torch.Tensor, tuple[int, ...], torch.Tensor]

    @staticmethod
    def of(samples: Sequence[torch.Tensor], starts: Sequence[int]) -> Pack:
        ids, lengths = torch.cat(list(samples)), tuple(len(sample) for sample in samples)
        positions = torch.cat([start + torch.arange(n) for start, n in zip(starts, lengths, strict=True)])
        ends = torch.tensor(lengths).cumsum(0)
        rows = torch.cat([torch.arange(int(end) - lengths[-1], int(end)) for end in ends])
        return Pack((ids, positions.to(ids.device), lengths, rows.to(ids.device)))

    def logits(self, model: PreTrainedModel) -> torch.Tensor:
        return widened(packed_logits(model, *self.inputs))


def probe(model: PreTrainedModel, seed: int, length: int | None = None) -> torch.Tensor:
    """A sample of random tokens, long enough to leave a short attention window."""
    config = model.config.get_text_config()
    if length is None:
        window = getattr(config, "sliding_window", None) or 0
        length = PROBE_TOKENS + (window if window <= PROBE_TOKENS else 0)
        length = min(length, getattr(config, "max_position_embeddings", None) or length)
    return torch.randint(vocabulary(model), (length,), generator=torch.Generator().manual_seed(seed)).to(model.device)


def _late_start(longest: Mapping[str, int], length: int) -> int:
    """Position from which a probe of this length reaches the last one of the longest sample."""
    return max(*longest.values(), length, 0) - length


@contextlib.contextmanager
def cannot_be_packed(model: PreTrainedModel, path: str, by_itself: str = "") -> Iterator[None]:
    """Raise an error in the block as an InputError that says why the model is not trained. by_itself: text for a model that
    transformers itself can run."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError | InputError):
            raise
        reason = _diagnosis().reason_of(model, error, by_itself)
        raise InputError(f"base_model {path!r}: a {model.config.model_type} model {reason}") from None


def _check_finite(
    model: PreTrainedModel, logits: torch.Tensor, path: str, everywhere: Callable[[list[str]], list[str]]
) -> None:
    if bool(logits.isfinite().all()):
        return
    bad = everywhere([name for name, tensor in model.state_dict().items() if not _is_finite(tensor)])
    if bad:
        more = f" and {plural(len(bad) - 1, 'more tensor')}" if bad[1:] else ""
        raise InputError(f"base_model {path!r}: the weights hold NaN or infinity: {bad[0]}{more}; load a sound copy")
    dtype = str(model.dtype).removeprefix("torch.")
    raise InputError(
        f"base_model {path!r}: its logits are not finite in {dtype}, though its weights are; try another dtype"
    )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers of the tensor are finite; for a tensor that is sharded over ranks, the numbers of all ranks."""
    if not isinstance(tensor, DTensor):
        return bool(tensor.isfinite().all())
    odd = tensor.to_local().isfinite().logical_not().sum().to(tensor.device_mesh.device_type)
    dist.all_reduce(odd, group=tensor.device_mesh.get_group())
    return not odd.item()


def difference(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> float:
    """Relative; in 16 bits of the middle token, because rounding there sends some tokens to another expert."""
    if got.shape != want.shape:
        return math.inf
    if dtype.itemsize < 4:
        return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median())
    return float((got - want).norm() / want.norm())


def gradient_crosses(model: PreTrainedModel, pack: Pack, n: int) -> bool:
    """Whether the logits of the last n tokens depend on other samples' embeddings. Rounding does not count: where tokens are
    sorted by expert, the size of a matrix product, and so its rounding, depends on all of them."""
    return depends_on_others(model, n, lambda: packed_logits(model, *pack.inputs))


def depends_on_others(
    model: PreTrainedModel, n: int, outputs: Callable[[], torch.Tensor], hidden: torch.Tensor | None = None
) -> bool:
    """Whether the last n rows of the result of `outputs` depend on the embeddings of tokens other than the last n.

    hidden: [1, T, D], what the embedding is to give in the place of what it gives.
    """
    embedded: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append((output if hidden is None else hidden).detach().requires_grad_())
        return embedded[-1]

    with model.get_input_embeddings().register_forward_hook(keep), torch.enable_grad():
        grads = torch.autograd.grad(outputs()[-n:].float().square().sum(), embedded, allow_unused=True)
    return any(grad is None or bool(grad[:, :-n].any()) for grad in grads)


def _check_limits(model: PreTrainedModel, limits: Mapping[str, int], path: str, longest: Mapping[str, int]) -> None:
    """Refuse samples that are longer than what a layer can be packed for."""
    if not limits:
        return
    name, limit = min(limits.items(), key=lambda item: item[1])
    config = model.config.get_text_config().to_dict()
    known = [f"{key} {value}" for key, value in config.items() if type(value) is int and value in (limit, limit + 1)]
    jobs = [f"{job!r} has samples of up to {tokens}" for job, tokens in longest.items() if tokens > limit]
    raise InputError(
        f"base_model {path!r}: packlora cannot train a {model.config.model_type} model on samples of more than {limit} tokens: "
        f"beyond that {name} does not attend as packed attention does"
        + (f" ({', '.join(known)} in its config)" if known else "")
        + f". Job {', '.join(jobs)}; set data.max_length to {limit} or less, and data.truncate to drop or right"
    )
