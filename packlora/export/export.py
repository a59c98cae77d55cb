"""`packlora export`: an adapter folder as another program reads it, with the same numbers.

    peft           as it is, modules named one by one
    vllm, sglang   one rank, one alpha, no rsLoRA: what these programs read of a configuration
    gguf           the same in one file for llama.cpp, see gguf_file.py

An adapter with ranks r_i and scalings s_i by layer is one of rank R = max r_i and scaling s with B_i multiplied by s_i / s, A_i
padded with rows and B_i with columns of zeros. The products are made in float32 and rounded once, to the dtype that is written.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

import torch
from safetensors import safe_open
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from packlora.adapters.expert_layout import is_scaled
from packlora.adapters.files import CONFIG, MAGNITUDE, STARTED, WEIGHTS, config_dict, tensor_key, under_both
from packlora.adapters.kinds import PARAMETERS, is_routed, routed
from packlora.adapters.older_names import module_of
from packlora.adapters.reading import read_start, stored_keys
from packlora.base.classes import served_class, unknown_architecture
from packlora.base.load import TOKENIZER_FILES, read_model, read_tokenizer
from packlora.base.own_tokenizer import TEMPLATE, own_template, own_tokenizer
from packlora.commands.adapter_folder import AdapterFolder, open_adapter
from packlora.config.peft import whole_number
from packlora.errors import InputError, needed, quoted
from packlora.export.as_served import (
    classes,
    compare,
    not_compared,
    why_not,
    with_peft,
)
from packlora.export.output import check_output, written
from packlora.files import write_file, write_folder, write_json, write_tensors, write_text
from packlora.form import is_stored
from packlora.lora_config import LoraConfig
from packlora.ops.modules import beside_decoder
from packlora.ops.twin import twin_of

Target = Literal["peft", "vllm", "sglang", "gguf", "ollama"]
TARGETS: tuple[Target, ...] = get_args(Target)
PROGRAM = {"vllm": "vLLM", "sglang": "SGLang", "gguf": "llama.cpp", "ollama": "Ollama"}
OF_LLAMA_CPP = ("gguf", "ollama")
"""Targets that are written as llama.cpp reads them."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for --max-lora-rank, which is 16 where it is not given."""
VLLM_RANK = 16
VLLM_FUSED = ("gpt_oss", "interns1_pro", "qwen3_5_moe", "qwen3_omni_moe_thinker", "qwen3_vl_moe")
"""Values of model_type for which vLLM takes adapters of experts as PEFT writes them, without a switch."""
GIVEN_BY = {
    "gguf": "give it to llama.cpp by --jinja --chat-template-file",
    "ollama": "Ollama's are of another form: write it into the Modelfile as TEMPLATE",
}
"""Ways to give a chat template to programs that take no folder."""
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest rounding error of a dtype, relative to the rounded number."""


def export_adapter(
    adapter_dir: Path,
    out: Path,
    target: str,
    base_model: str | None = None,
    dtype: str = "float32",
    check: str = "auto",
) -> list[str]:
    """Write an adapter for another program. Its names of modules are those of the class that the base model's folder names.

    Args:
        adapter_dir: a PEFT LoRA or DoRA adapter folder.
        out: the folder to write, which must not exist or be empty; for gguf the file, which must not exist.
        target: one of TARGETS. ollama gets a folder with a file for llama.cpp and a Modelfile.
        base_model: where the base model is; default is the adapter's base_model_name_or_path.
        dtype: of the tensors that are written; auto is the base's.
        check: whether the logits of what is written are held against the adapter's before `out` appears, see as_served.py.
            Without that the base's weights are not read. A file for llama.cpp is not run.

    Returns:
        What the user should know.

    Raises:
        InputError: the adapter, the base or `out` cannot be used, the program cannot hold such an adapter, or what is written
            does not give the adapter's logits.
        WriteError: the disk is full or broken.
    """
    if target not in TARGETS:
        raise InputError(f"--for {target!r} is not one of {', '.join(TARGETS)}")
    check_output(out, dtype, is_file=target == "gguf")
    opened = whole = open_adapter(adapter_dir, base_model)
    opened.spec.peft.base_model_name_or_path = opened.base  # which has moved, where the user says so
    unchecked = why_not(check, opened)
    notes = [opened.note] if opened.note else []
    if named := unknown_architecture(opened.base_config):
        notes.append(
            f"base model {opened.base} names {quoted(named, 80)} as its architecture, which transformers does not have; "
            f"modules are named as in {type(opened.skeleton).__name__}"
        )
    if target != "peft":
        _check_plain(opened, PROGRAM[target])
        _check_ends(opened, target)
        _check_parameters(opened, target)
        opened = plain(opened)
    gguf = _gguf_file() if target in OF_LLAMA_CPP else None
    names = {} if gguf is None else gguf.gguf_names(opened)
    base_dtype = opened.skeleton.config.dtype or torch.float32
    opened = replace(opened, tensors=_cast(opened, base_dtype if dtype == "auto" else getattr(torch, dtype)))

    def write(folder: Path) -> None:
        suffix = ".weight"  # suffix of magnitudes in adapters/files.py
        tensors = under_both(opened.tensors, opened.spec) if target == "peft" else opened.tensors
        tensors = {key + suffix * key.endswith(MAGNITUDE): tensor for key, tensor in tensors.items()}
        start = read_start(adapter_dir) if target == "peft" else None  # others get other ranks
        write_tensors(folder / WEIGHTS, tensors, None if start is None else {STARTED: start})
        write_json(folder / CONFIG, config_dict(opened.spec.peft))
        prove_names(folder, opened.skeleton, target == "peft")
        what = f"the adapter for {PROGRAM.get(target, 'PEFT')}"
        if (template := own_template(adapter_dir)) is not None:
            write_text(folder / TEMPLATE, template)
        notes.extend(_compared(whole, folder, target, what) if unchecked is None else not_compared(what, unchecked))

    with written(out) as path:
        if gguf is not None and target == "gguf":
            write_file(path, lambda file: gguf.write_gguf(file, opened, names))
        elif gguf is not None:
            write_folder(path, lambda folder: write_ollama(folder, opened, names))
        else:
            write_folder(path, write)
    if target in GIVEN_BY and own_template(adapter_dir) is not None:
        notes.append(f"it was trained with the chat template {adapter_dir / TEMPLATE}; {GIVEN_BY[target]}")
    return notes + _own_tokens(opened) + _to_know(opened, target)


def _own_tokens(opened: AdapterFolder) -> list[str]:
    """Note about a tokenizer in the adapter's folder by which a program that serves the base does not go."""
    if not any(file.name.startswith(TOKENIZER_FILES) for file in opened.path.iterdir()):
        return []
    own = None
    with contextlib.suppress(InputError):  # a base without a tokenizer
        own = own_tokenizer(opened.path, read_tokenizer(opened.base, opened.config.revision))
    if own is None:
        return []
    return [
        f"{opened.path} has a tokenizer of its own, with {own.what} than the base model's, which is not exported; "
        "`packlora merge` writes it into a plain model"
    ]


def _gguf_file() -> ModuleType:
    """The module that writes files of llama.cpp. Raises InputError where its library is not installed."""
    try:
        from packlora.export import gguf_file
    except ModuleNotFoundError:
        raise needed("gguf", "gguf", "a file for llama.cpp") from None
    return gguf_file


def write_ollama(folder: Path, opened: AdapterFolder, names: Mapping[str, str]) -> None:
    """Write an adapter and the Modelfile from which `ollama create NAME -f Modelfile` makes a model."""
    _gguf_file().write_gguf(folder / "adapter.gguf", opened, names)
    base = " ".join(opened.base.split())  # a line is a command there
    text = f"# ollama create NAME -f Modelfile\nFROM {base}\nADAPTER ./adapter.gguf\n"
    write_text(folder / "Modelfile", text)


def serve_command(out: Path, target: str) -> str | None:
    """The command that serves an exported adapter, under its folder's name; None for programs without one."""
    if target == "ollama":
        return f"ollama create {shlex.quote(out.name.lower())} -f {shlex.quote(str(out / 'Modelfile'))}"
    if target not in ("vllm", "sglang"):
        return None
    config = json.loads((out / CONFIG).read_text(encoding="utf-8"))
    base, named = str(config["base_model_name_or_path"]), f"{out.name}={out.absolute()}"
    template = ["--chat-template", str((out / TEMPLATE).absolute())] if own_template(out) is not None else []
    if target == "sglang":
        return shlex.join(
            ["python", "-m", "sglang.launch_server", "--model-path", base, "--lora-paths", named, *template]
        )
    rank = next((known for known in VLLM_RANKS if known >= config["r"]), config["r"])
    words = ["vllm", "serve", base, "--enable-lora", "--max-lora-rank", str(rank)]
    return shlex.join([*words, "--lora-modules", named, *template])


def prove_names(folder: Path, model: PreTrainedModel, also_twin: bool = False) -> None:
    """Raises InputError where a tensor of an adapter folder is of no module of a model without weights: other programs pass it
    over, and say so at most in a log. also_twin: names of its twin are meant as well, see adapters/names.py."""
    known = {path for path, _ in model.named_modules(remove_duplicate=False)} - {""}
    twin = twin_of(model)
    known |= {path for path, _ in twin.model.named_modules()} - {""} if also_twin and twin is not None else set()
    for key in stored_keys(folder):
        if module_of(key) not in known:
            raise InputError(
                f"{folder}: {key!r} is of no module of {type(model).__name__}, which the base model's folder names as its "
                "architecture; nothing is written"
            )


def _compared(opened: AdapterFolder, folder: Path, target: str, what: str) -> list[str]:
    """Hold the logits of an exported folder against the adapter's, see as_served.compare."""
    base, revision = opened.base, opened.config.revision
    if is_stored(opened.base_config):
        return not_compared(what, "the base model is saved in codes")
    served = {
        name: partial(with_peft, base, revision, folder, cls)
        for name, cls in classes(opened).items() if cls is served_class or target == "peft"
    }  # fmt: skip
    load = partial(read_model, base, revision, torch.float32)
    return compare(opened, lambda cls: load(class_of=cls), served, what, ROUNDING.get(_dtype_of(folder), 0.0))


def _dtype_of(folder: Path) -> torch.dtype:
    with safe_open(folder / WEIGHTS, "pt") as stored:
        dtype: torch.dtype = stored.get_tensor(next(iter(stored.keys()))).dtype
    return dtype


def _merging(opened: AdapterFolder) -> str:
    for path, module in opened.spec.modules.items():
        base = opened.skeleton.get_submodule(path) if is_routed(module.kind) else None
        if base is not None and (reason := routed(module.kind).why_not_merged(base)):
            return f"nor can it be merged: it adapts {path}, {reason}"
    return f"`packlora merge {opened.path} OUT` makes a plain model of it (--dtype float32: to the last digits)"


def _check_plain(opened: AdapterFolder, program: str) -> None:
    """Raises InputError where an adapter holds more than two low-rank factors a layer."""
    for path, module in opened.spec.modules.items():
        unread = (routed(module.kind).unread if is_routed(module.kind) else None) or ""
        kinds = {
            f"is a DoRA adapter: {program} reads none, and no LoRA adapter has its numbers": module.use_dora,
            f"{unread.format(path=path)}, which {program} does not read": bool(unread),
            f"holds trained biases, the first of {path}, which {program} does not read": module.train_bias,
        }
        if problem := next((text for text, holds in kinds.items() if holds), None):
            raise InputError(f"{opened.path} {problem}; {_merging(opened)}")


def _check_ends(opened: AdapterFolder, target: str) -> None:
    """Raises InputError where an adapter of an embedding or of the output layer is none that the program takes."""
    if target in OF_LLAMA_CPP and (ends := _ends(opened)):
        raise InputError(
            f"{opened.path} adapts {ends[0]}, which {PROGRAM[target]} does not read of an adapter; {_merging(opened)}"
        )


def _ends(opened: AdapterFolder) -> list[str]:
    """Paths of adapted embeddings, and of the output layer where it is."""
    head = opened.skeleton.get_output_embeddings()
    return [
        path
        for path, module in opened.spec.modules.items()
        if module.kind == "embedding" or (module.kind not in PARAMETERS and opened.skeleton.get_submodule(path) is head)
    ]


def _check_parameters(opened: AdapterFolder, target: str) -> None:
    """Raises InputError where experts or routers are adapted and the program does not read them."""
    of = {path: module.kind for path, module in opened.spec.modules.items() if module.kind in PARAMETERS}
    remedy = _merging(opened)
    if of and target != "vllm":
        raise InputError(f"{opened.path} adapts {next(iter(of))}: {PROGRAM[target]} reads no adapters of it; {remedy}")
    if routers := [path for path, kind in of.items() if kind == "router"]:
        raise InputError(
            f"{opened.path} adapts {routers[0]}: whether vLLM reads adapters of routers is not known; {remedy}"
        )
    if of and (stored := _published(opened, path := next(iter(of)))) is not None:
        raise InputError(
            f"{opened.path} adapts {path}, which published files name {stored}: vLLM goes by their names, and would pass the "
            f"adapter over without a word; {remedy}"
        )
    pairs: dict[str, list[str]] = {}
    for path in of:
        if is_scaled(opened.skeleton.get_submodule(path.rpartition(".")[0])):
            raise InputError(
                f"{opened.path} adapts {path}, of which PEFT's file has A and B the other way round than vLLM reads them; "
                f"{remedy}"
            )
        pairs.setdefault(path.rpartition(".")[0], []).append(path)
    for owner, paths in pairs.items():
        if len(paths) != 2:
            raise InputError(
                f"{opened.path} adapts {paths[0]} alone: vLLM reads adapters of all weights of {owner}, or of none; {remedy}"
            )


def _published(opened: AdapterFolder, path: str) -> str | None:
    """The first name in published files of the weight of experts at a path, where their block has another path there."""
    stored = next(iter(revert_weight_conversion(opened.skeleton, {path: opened.skeleton.get_parameter(path)})))
    return None if stored.startswith(path.rsplit(".", 2)[0] + ".") else str(stored)


def plain(opened: AdapterFolder) -> AdapterFolder:
    """Adapter with one rank and one alpha / r for all layers, computing the same function. It has no magnitudes and no
    biases."""
    modules, tensors = opened.spec.modules, {}
    rank = max(module.rank for module in modules.values())
    (scaling, _), *_ = Counter(module.scaling for module in modules.values()).most_common(1)
    for path, module in modules.items():
        keys = {name: tensor_key(path, name, module) for name in "AB"}
        A, B = (opened.tensors[key] for key in keys.values())
        more = rank - module.rank
        B = B * (module.scaling / scaling)
        # experts: A [E r, K] expert by expert, B [N, r E] with the expert running fastest
        experts = A.shape[0] // module.rank
        tensors[keys["A"]] = pad(A.view(experts, -1, A.shape[1]), (0, 0, 0, more)).flatten(0, 1)
        tensors[keys["B"]] = pad(B.view(B.shape[0], -1, experts), (0, 0, 0, more)).flatten(1)
    config: LoraConfig = copy.copy(opened.spec.peft)
    config.r, config.lora_alpha, config.use_rslora = rank, whole_number(scaling * rank), False
    config.rank_pattern, config.alpha_pattern = {}, {}
    same = {path: replace(module, rank=rank, scaling=scaling) for path, module in modules.items()}
    return replace(opened, config=config, spec=replace(opened.spec, peft=config, modules=same), tensors=tensors)


def _cast(opened: AdapterFolder, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    out = {key: tensor.to(dtype) for key, tensor in opened.tensors.items()}
    for key, tensor in out.items():
        if not tensor.isfinite().all():
            raise InputError(
                f"{opened.path}: {key} is not finite in {str(dtype).removeprefix('torch.')}; take another dtype"
            )
    return out


def _to_know(opened: AdapterFolder, target: str) -> list[str]:
    rank, notes = opened.spec.peft.r, []
    if target in ("vllm", "sglang") and (ends := _ends(opened)):
        notes = [
            f"it adapts {' and '.join(ends)}: {PROGRAM[target]} takes that for some families; `packlora merge` "
            "makes a plain model"
        ]
    of_images = beside_decoder(opened.skeleton)
    if target in ("vllm", "sglang") and (beside := [path for path in opened.spec.modules if path in of_images]):
        reads = (
            "reads that with --enable-tower-connector-lora alone, and"
            if target == "vllm"
            else "may pass that over, and"
        )
        notes.append(
            f"it adapts {beside[0]}, beside the language model: {PROGRAM[target]} {reads} says so at most in its log"
        )
    kind = opened.base_config.model_type
    if opened.spec.parameter is not None and target == "vllm" and kind not in VLLM_FUSED:
        notes.append(
            f"it adapts experts of {kind}: start vLLM with --enable-mixed-moe-lora-format, and load the adapter with "
            "is_3d_lora_weight: true"
        )
    if target != "vllm" or rank <= VLLM_RANK:
        return notes
    if enough := [known for known in VLLM_RANKS if known >= rank]:
        return [*notes, f"rank {rank}: start vLLM with --max-lora-rank {enough[0]}"]
    return [*notes, f"rank {rank}: vLLM takes at most {VLLM_RANKS[-1]}; `packlora merge` makes a plain model"]
