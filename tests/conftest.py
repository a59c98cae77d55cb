"""Shared by all tests: no network for model hubs, and tiny models of each family that need no download."""

from __future__ import annotations

import os
import shutil

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
# one thread, in all processes: the models are tiny, and threads that wait for each other on a busy machine cost minutes
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_CBWR"] = "AUTO,STRICT"  # as packlora sets it; MKL reads it at the first product of a process
if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; read when they are defined
# files of tests stay in memory where there is plenty: every file that replaces another is written to the disk at once
if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 1 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
# modules that tests write are compiled anew whenever they are imported: two of one second and one size would be taken for one
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

import gc
import importlib.util
import json
import random
import secrets
import signal
import sqlite3
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from ranks import Ranks
from seeds import SEED, SOAK
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from unflushed import Unflushed
from whole_models import whole_folder

gc.set_threshold(20_000, 20, 20)  # collections are a twentieth of the time of toy runs; every file collects at its end
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # the background of a shell ignores it, and all that is started there
os.fsync = lambda handle: None  # no test pulls the plug, and a third of a short run would be spent on flushing disks
sqlite3.connect = partial(sqlite3.connect, factory=Unflushed)
if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreter import make_fast

    make_fast()
torch.set_num_threads(1)
if importlib.util.find_spec("bitsandbytes") is not None:
    from bitsandbytes.backends.default import ops as of_bitsandbytes

    for name in (
        "_dequantize_4bit_compute",
        "_dequantize_blockwise_compute",
    ):  # compiled, the first call takes ten seconds
        own = getattr(of_bitsandbytes, name, None)
        setattr(of_bitsandbytes, name, getattr(own, "__wrapped__", own))
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", action="store_true", help="a tenth of the cases, always the same, without slow ones")


def pytest_itemcollected(item: pytest.Function) -> None:
    """Tests of gpu/ are marked `gpu`, and what is marked so needs one, but in files that TWO_ON gives processes of a CPU."""
    if item.path.parent.name == "gpu":
        item.add_marker("gpu")
    if item.get_closest_marker("gpu") is not None and getattr(item.module, "DEVICE", None) != "cpu":
        item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What `make quick`, `make test` and `make soak` choose: cases marked `soak`, and two thirds of the `sampled` ones, are for
    the last alone. Without a GPU, or processes of a CPU in the place of several (TWO_ON), one test of each file that needs it
    says so.
    """
    has_gpu = torch.cuda.is_available() or "TWO_ON" in os.environ
    tenth, seen = config.getoption("--tenth"), set[Path]()

    def chosen(item: pytest.Item) -> bool:
        if item.get_closest_marker("gpu") is not None and not has_gpu:
            if item.path in seen:
                return False
            seen.add(item.path)
        if item.get_closest_marker("soak") is not None and not SOAK:
            return False
        if item.get_closest_marker("sampled") is not None and not SOAK and zlib.crc32(item.nodeid.encode()) % 3:
            return False
        return not tenth or (zlib.crc32(item.nodeid.encode()) % 10 == 0 and item.get_closest_marker("slow") is None)

    kept = {item: chosen(item) for item in items}
    config.hook.pytest_deselected(items=[item for item, keeps in kept.items() if not keeps])
    items[:] = [item for item, keeps in kept.items() if keeps]


TINY: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 8}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 8}),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "full_attention_interval": 2,
        },
    ),
}  # fmt: skip
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A random model whose weights are large enough that every part of it matters to the logits."""
    name, extra = FAMILIES[family]
    config = getattr(transformers, name)(**{**TINY, **extra, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            spread = 0.2 if tensor.ndim > 1 else 0.1
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * spread
            tensor.add_(noise.to(dtype))
    return model


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer of 320 tokens with a chat template, trained on a sentence."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the quick brown fox jumps over the lazy dog and then some more of the same"] * 4, trainer)
    from tokenizers.decoders import ByteLevel

    bpe.decoder = ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"], chat_template=CHAT,
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Callable[[str], str]:
    """family -> folder of a saved tiny model with its tokenizer. `shallow` is a llama of one layer."""
    made: dict[str, str] = {}

    def make(family: str = "llama") -> str:
        if family not in made:
            folder = tmp_path_factory.mktemp(f"base-{family}")
            model = tiny_model("llama", num_hidden_layers=1) if family == "shallow" else tiny_model(family)
            model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>"])
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[family] = str(folder)
        return made[family]

    return make


@pytest.fixture(scope="session")
def whole_base(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Callable[..., str]:
    """(family, settings of its part for texts) -> folder of a saved tiny multimodal model, see whole_models.py."""
    made: dict[str, str] = {}

    def make(family: str = "qwen3_5", **text: Any) -> str:
        key = f"{family} {text}"
        if key not in made:
            made[key] = whole_folder(family, tokenizer, tmp_path_factory.mktemp("whole"), **text)
        return made[key]

    return make


WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "then",
    "some",
    "more",
    "of",
    "the",
    "same",
    "thing",
    "again",
]


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """(name, number, seed) -> path of a jsonl file of prompt/completion rows of different lengths."""
    return rows_into(tmp_path)


def rows_into(folder: Path) -> Callable[..., str]:
    """What `write_rows` gives, for any folder."""

    def write(name: str, number: int = 12, seed: int = 0, longest: int = 12) -> str:
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for _ in range(number):
            words = int(torch.randint(2, longest, (1,), generator=generator))
            picks = torch.randint(0, len(WORDS), (words,), generator=generator).tolist()
            text = " ".join(WORDS[pick] for pick in picks)
            rows.append({"prompt": text, "completion": " ".join(reversed(text.split()[:4]))})
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random numbers begin anew, so that no test depends on which ones came before it in its process."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    secrets.randbits = random.Random(SEED).getrandbits  # seeds that a service draws where a request names none


def pytest_sessionstart() -> None:
    """Modules of tests, whose asserts pytest rewrites, are kept for the other workers and the next time."""
    sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """What was imported by now is not looked through again by every collection of garbage."""
    sys.dont_write_bytecode = True
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Set aside what a file has left, imports above all, so that later collections of garbage do not look through it."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed loops collect no garbage: at toy sizes, in a process as large as that of all tests, they would do little else."""
    monkeypatch.setattr("packlora.tune.timing.gc", mock.Mock())


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many norms each look at their data on a device looks at; kernels run in the interpreter."""
    pytest.importorskip("triton")
    from packlora.ops.row_norm import row_norm
    from packlora.ops.row_norm.triton_path import Batch

    monkeypatch.setattr(row_norm, "KERNELS_ON_CPU", True)
    found: list[int] = []
    original = Batch.stale
    monkeypatch.setattr(Batch, "stale", lambda self, seen: found.append(len(seen)) or original(self, seen))
    return found


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Process groups by their size; each is started once."""
    groups: dict[int, Ranks] = {}
    yield lambda size: groups.setdefault(size, Ranks(size))
    for group in groups.values():
        group.close()
