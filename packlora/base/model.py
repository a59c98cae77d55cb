"""The frozen base model: loading it, and running it on packed samples.

Owns what packlora must know of transformers: model and tokenizer loading, the attention that keeps packed samples apart,
the device and the floating-point type. Adapters are put on by adapters/attach.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from packlora.base.demo_model import base_path
from packlora.base.liger import use_liger
from packlora.base.masks import OWN_MASKS, Seen
from packlora.base.rotary import rotate_by_sample
from packlora.config import Run
from packlora.errors import InputError, foreign, quoted
from packlora.ops.attention import packed_attention

ATTENTION = "packlora"
"""Name under which packed attention is registered with transformers. It has no mask function, so no mask is built."""


LISTED = 8
"""Names of weights that a message lists."""
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
"""How names of a tokenizer's files begin."""
OLD_BUFFERS = re.compile(r"\.(attn|attention|self_attn)\.(bias|masked_bias|causal_mask)$|\.inv_freq$")
"""Masks and frequencies that files of older versions hold and models now make themselves."""
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
    """In words, how many DoRA layers keep their outputs, where the run asks for it: adapters/kept_outputs.py."""


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
        kind = "folder" if os.path.isdir(path) else "hub id, or folder that does not exist"
        raise InputError(f"base_model {quoted(path, 300)} ({kind}): cannot load the {what}: {foreign(error)}") from None


def load_tokenizer(run: Run) -> Any:
    """The tokenizer of the base model. Raises InputError when there is none, or none that can be used."""
    return read_tokenizer(base_path(run.base_model), run.revision, run.trust_remote_code)


def read_tokenizer(path: str, revision: str | None, trust_remote_code: bool = False) -> Any:
    """The same of a folder or a hub id."""
    if os.path.isdir(path) and not any(file.name.startswith(TOKENIZER_FILES) for file in Path(path).iterdir()):
        raise InputError(
            f"base_model {path!r}: the folder holds no tokenizer (tokenizer.json); save it there beside the weights"
        )
    tokenizer = _load(
        "tokenizer",
        path,
        lambda: AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code),
    )
    if not isinstance(tokenizer.model_max_length, int | float):
        raise InputError(
            f"base_model {path!r}: the tokenizer's model_max_length is {quoted(tokenizer.model_max_length)}, not a number"
        )
    return tokenizer


MOST = {"layers": 10_000, "experts": 100_000}
"""Of a base model; many more would take all memory only to be laid out. Doge names 16384 experts."""


def _check_sizes(config: Any, path: str) -> None:
    """Raises InputError for a number of layers or experts that no model has."""
    pending = [config.to_dict()]
    while pending:
        for key, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif isinstance(value, int) and (found := re.search(r"layers|n_layer\b|experts", str(key))):
                most = MOST["experts" if found.group() == "experts" else "layers"]
                if value > most:
                    raise InputError(
                        f"base_model {path!r}: its configuration has {key} {value}, more than {most}; this is no model"
                    )


def load_skeleton(run: Run) -> PreTrainedModel:
    """The model without weights (meta device): enough to find layers and count parameters."""
    return read_skeleton(base_path(run.base_model), run.revision, run.trust_remote_code)


def read_skeleton(path: str, revision: str | None, trust_remote_code: bool = False) -> PreTrainedModel:
    """The same of a folder or a hub id."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise InputError(f"base_model {path!r} is not a folder; give the folder of a model or a Hugging Face model id")
    config = _load(
        "configuration",
        path,
        lambda: AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code),
    )
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(f"base_model {path!r} is quantised; this version takes float bases only")
    _check_sizes(config, path)
    with torch.device("meta"):
        model = _load(
            "model",
            path,
            lambda: AutoModelForCausalLM.from_config(
                config,
                trust_remote_code=trust_remote_code,
                attn_implementation="eager",  # a configuration may name one that is code on the hub
            ),
        )
    assert isinstance(model, PreTrainedModel)
    return model


def load_base(run: Run, tokenizer: Any, longest: Mapping[str, int] | None = None) -> Base:
    """Load the base model for packed training: frozen, on its device, in the run's dtype.

    Args:
        longest: tokens of the longest sample of each job. Longer ones are not known to be computed right; without it, than
            PROBE_TOKENS.

    Raises:
        InputError: it cannot be loaded, its weights are not those of its configuration, or packing would train it wrongly.
    """
    path, device = base_path(run.base_model), choose_device(run.device)
    model = read_model(path, run.revision, getattr(torch, run.dtype), run.trust_remote_code)
    _check_row(model, run.max_tokens_per_microbatch, path)
    model.to(device)
    own = _own_numbers(model, path, longest or {})
    notes = prepare_model(model, run.gradient_checkpointing)
    replaced = use_liger(model, run.liger)
    fused_loss = _check_packing(model, own, path, longest or {}, notes)
    return Base(model, tokenizer, device, path, notes, fused_loss, replaced)


def read_model(path: str, revision: str | None, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a folder or a hub id, as transformers runs it, on the CPU.

    Raises:
        InputError: it cannot be loaded, or its weights are not those of its configuration.
    """
    _check_files(path)
    transformers.utils.logging.disable_progress_bar()
    with _quiet():  # its report of the weights is _check_weights' matter
        model, found = _load(
            "model",
            path,
            lambda: AutoModelForCausalLM.from_pretrained(
                path,
                revision=revision,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                attn_implementation="eager",
                use_safetensors=True,  # the other format is a pickle
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            ),
        )
    _check_weights(path, found)
    assert isinstance(model, PreTrainedModel)
    return model


def _check_files(path: str) -> None:
    """Refuse a folder whose weights cannot be what is wanted. A hub id is transformers' to find."""
    if not os.path.isdir(path):
        return
    names = sorted(file.name for file in Path(path).iterdir())
    if "adapter_config.json" in names:
        raise InputError(
            f"base_model {path!r}: the folder holds an adapter; give the base model, and init_from the adapter"
        )
    if any(name.endswith(".safetensors") for name in names):
        return
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        raise InputError(
            f"base_model {path!r}: the folder holds its weights only as {pickles[0]}, a pickle, which may run any code and is "
            "not opened; load it where you trust it, and save_pretrained it as model.safetensors"
        )
    raise InputError(f"base_model {path!r}: the folder holds no weights (model.safetensors)")


def _check_weights(path: str, found: Mapping[str, Any]) -> None:
    """Refuse weights that are not those that the configuration asks for: what is missing would be random.

    Args:
        found: transformers' report on loading; its mismatched_keys are (name, shape in the files, shape in the model).
    """
    odd = {f"{name} is {list(saved)}, not {list(wanted)}" for name, saved, wanted in found.get("mismatched_keys", ())}
    faults = [
        (found.get("missing_keys", ()), "lack {} weights of the model that config.json describes"),
        (
            [name for name in found.get("unexpected_keys", ()) if not OLD_BUFFERS.search(name)],
            "hold {} weights that the model has no place for",
        ),
        (odd, "hold {} weights of another shape than config.json says"),
    ]
    said = [f"{what.format(len(keys))}: {_some(sorted(keys))}" for keys, what in faults if keys]
    if said:
        raise InputError(f"base_model {path!r}: the weight files {'; they '.join(said)}")


def _check_row(model: PreTrainedModel, budget: int | str, path: str) -> None:
    """Refuse microbatches longer than a causal mask [1, 1, N, N] that an attention layer keeps for itself (GPT-Neo)."""
    for name, buffer in model.named_buffers():
        N = buffer.shape[-1] if buffer.ndim else 0
        if buffer.shape == (1, 1, N, N) and N > 1 and (isinstance(budget, str) or budget > N):
            raise InputError(
                f"base_model {path!r}: a {model.config.model_type} model keeps masks for {N} tokens ({name}), and so takes no "
                f"more in one microbatch; max_tokens_per_microbatch is {budget}, set it to {N} or less"
            )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if names[LISTED:] else "")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)


def prepare_model(model: PreTrainedModel, gradient_checkpointing: bool) -> list[str]:
    """Make a model run packed samples, frozen and without randomness of its own. Returns what the user should know."""
    notes = []
    model.requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    model.eval()
    rotate_by_sample(model)
    for module in _by_place(model).values():
        module.attn_temperature_tuning = False  # a factor of 1 up to the length that load_base allows
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
            if (rate or "drop" in name) and isinstance(value, float) and value > 0:
                setattr(owner, name, 0.0)
                found = True
    return found


# --- may this model be packed? -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Own:
    """What the model gives as transformers runs it, which packing is held against.

    second, late: logits of a probe alone, and of one at the last positions that samples reach. long: of the last tokens of a
    sample as long as the longest, None where the probes are. limits: tokens up to which layers can be packed, by name.
    """

    second: torch.Tensor
    late: torch.Tensor
    long: torch.Tensor | None
    limits: dict[str, int]


def _probe(model: PreTrainedModel, seed: int, length: int | None = None) -> torch.Tensor:
    """A sample of random tokens, long enough to leave a short attention window."""
    config = model.config.get_text_config()
    if length is None:
        window = getattr(config, "sliding_window", None) or 0
        length = PROBE_TOKENS + (window if window <= PROBE_TOKENS else 0)
        length = min(length, getattr(config, "max_position_embeddings", None) or length)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).to(model.device)


def _late_start(longest: Mapping[str, int], length: int) -> int:
    """Position from which a probe of this length reaches the last one of the longest sample."""
    return max(*longest.values(), length, 0) - length


@contextlib.contextmanager
def _cannot_be_packed(model: PreTrainedModel, path: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        first_line = str(error).strip().split("\n")[0]
        first_line = first_line if " " in first_line else repr(error)  # a key alone says nothing
        raise InputError(
            f"base_model {path!r}: a {model.config.model_type} model cannot be packed: {first_line}"
        ) from None


@torch.no_grad()
def _own_numbers(model: PreTrainedModel, path: str, longest: Mapping[str, int]) -> _Own:
    """Run the untouched model on each probe alone. Raises InputError if it does not give numbers."""
    model.eval()
    second, first = _probe(model, 2), _probe(model, 1)
    start, tokens = _late_start(longest, len(first)), max(longest.values(), default=0)
    limits = {name: module.floor_scale - 1 for name, module in _by_place(model).items() if module.floor_scale <= tokens}
    seen, long = Seen({id(module): name for name, module in model.named_modules()}, limits), None
    with _cannot_be_packed(model, path):
        alone = model(input_ids=second[None], use_cache=False).logits[0].double()
        _check_finite(model, alone, path)
        if tokens > len(first):
            model.set_attn_implementation(OWN_MASKS)
            long = model(
                input_ids=_probe(model, 4, tokens)[None], use_cache=False, own_masks=seen,
                logits_to_keep=torch.arange(tokens - len(first), tokens, device=model.device),
            ).logits[0].double()  # fmt: skip
            model.set_attn_implementation("eager")
        positions = start + torch.arange(len(first), device=model.device)
        late = model(input_ids=first[None], position_ids=positions[None], use_cache=False).logits[0].double()
    return _Own(alone, late, long, seen.limits)


def _by_place(model: PreTrainedModel) -> dict[str, Any]:
    """Attention layers that scale a query by its place in the row, from the floor_scale-th on (Llama 4 without positions)."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "attn_temperature_tuning", False)
        and not getattr(module, "use_rope", False)
        and isinstance(getattr(module, "floor_scale", None), int | float)
    }


def _check_finite(model: PreTrainedModel, logits: torch.Tensor, path: str) -> None:
    if bool(logits.isfinite().all()):
        return
    bad = [name for name, tensor in model.state_dict().items() if not bool(tensor.isfinite().all())]
    if bad:
        more = f" and {len(bad) - 1} more tensors" if bad[1:] else ""
        raise InputError(f"base_model {path!r}: the weights hold NaN or infinity: {bad[0]}{more}; load a sound copy")
    dtype = str(model.dtype).removeprefix("torch.")
    raise InputError(
        f"base_model {path!r}: its logits are not finite in {dtype}, though its weights are; try another dtype"
    )


@torch.no_grad()
def _check_packing(model: PreTrainedModel, own: _Own, path: str, longest: Mapping[str, int], notes: list[str]) -> bool:
    """Refuse a model that packed attention does not serve: most such models would run, and train something else.

    Two samples are packed, three times; the first one, at late positions, is another one the third time. Then the second one
    behind a sample as long as the longest of the run. Each must have the logits that the untouched model gives it alone.

    Returns:
        Whether the output layer on the decoder's hidden states gives these logits too, to the bit. It does not where a
        model scales or caps its logits, or treats the hidden states first.

    Raises:
        InputError: the model mixes tokens outside its attention (convolutions, recurrences, position biases), its attention
            is not causal softmax attention with an optional window or cap, also not so at the length of the run's samples,
            or it draws random numbers.
    """
    second = _probe(model, 2)
    n = len(second)
    packs = [_Pack.of([_probe(model, seed), second], [_late_start(longest, n), 0]) for seed in (1, 1, 3)]
    with _cannot_be_packed(model, path):
        outputs = [pack.logits(model) for pack in packs]
        same_bits = torch.equal(outputs[0][n:], outputs[2][n:])
        apart = same_bits or not _gradient_crosses(model, packs[2], n)
    what = f"base_model {path!r}: packlora cannot train a {model.config.model_type} model: "
    if not torch.equal(outputs[0], outputs[1]):
        raise InputError(what + "it gives other numbers every time it is run, so it draws random numbers of its own")
    if not apart or outputs[0][n:].shape != own.second.shape:
        raise InputError(what + "samples that are packed together see each other")
    if not same_bits:
        notes.append("the rounding of the model's experts depends on all samples of a microbatch, and so on other jobs")
    _check_limits(model, own.limits, path, longest)
    pairs = [(outputs[0][:n], own.late), (outputs[0][n:], own.second), (outputs[2][n:], own.second)]
    if own.long is not None:
        long = _Pack.of([_probe(model, 4, max(longest.values())), second], [0, 0])
        with _cannot_be_packed(model, path):
            behind = long.logits(model)
        pairs += [(behind[:n], own.long), (behind[n:], own.second)]
    difference = max(_difference(got, want, model.dtype) for got, want in pairs)
    if not difference < PROBE_ERROR[model.dtype]:
        raise InputError(what + f"its attention is of another kind (its own logits differ by {difference:.1%})")
    head = plain_head(model)
    if head is None:
        return False
    try:
        hidden = packed_hidden(model, *packs[2].inputs)
        return torch.equal(torch.nn.functional.linear(hidden[None], head.weight, head.bias)[0].double(), outputs[2])
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False  # a model that cannot be run without its output layer


@dataclass(frozen=True, slots=True)
class _Pack:
    """Probes in one row. inputs: of packed_logits; of each probe as many last tokens are kept as the last one has."""

    inputs: tuple[torch.Tensor, torch.Tensor, tuple[int, ...], torch.Tensor]

    @staticmethod
    def of(samples: Sequence[torch.Tensor], starts: Sequence[int]) -> _Pack:
        ids, lengths = torch.cat(list(samples)), tuple(len(sample) for sample in samples)
        positions = torch.cat([start + torch.arange(n) for start, n in zip(starts, lengths, strict=True)])
        ends = torch.tensor(lengths).cumsum(0)
        rows = torch.cat([torch.arange(int(end) - lengths[-1], int(end)) for end in ends])
        return _Pack((ids, positions.to(ids.device), lengths, rows.to(ids.device)))

    def logits(self, model: PreTrainedModel) -> torch.Tensor:
        return packed_logits(model, *self.inputs).double()


def _difference(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> float:
    """Relative; in 16 bits of the middle token, because rounding there sends some tokens to another expert."""
    if got.shape != want.shape:
        return math.inf
    if dtype.itemsize < 4:
        return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median())
    return float((got - want).norm() / want.norm())


def _gradient_crosses(model: PreTrainedModel, pack: _Pack, n: int) -> bool:
    """Whether the logits of the last n tokens depend on other samples' embeddings. Rounding does not count: where tokens are
    sorted by expert, the size of a matrix product, and so its rounding, depends on all of them."""
    embedded: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad():
            logits = packed_logits(model, *pack.inputs)[-n:]
            grads = torch.autograd.grad(logits.float().square().sum(), embedded, allow_unused=True)
    finally:
        hook.remove()
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
