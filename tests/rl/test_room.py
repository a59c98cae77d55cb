"""Room of the sampler on a GPU."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sampling_cases import case_of, prompt

from packlora.engine.generate import Sampler
from packlora.engine.sampling import SampleRequest
from packlora.rl import drawing, room


def test_the_bytes_of_a_token_are_those_that_the_cache_takes(tmp_path: Path) -> None:
    case = case_of(tmp_path, ("lora",), torch.float32, num_hidden_layers=2)
    sampler = Sampler(case.model, case.attached)
    sampler.submit(SampleRequest(prompt(0, 5), max_tokens=4))
    sampler.step()
    cache = sampler._passes.cache
    taken = sum(tensor.nbytes for pair in cache.layers.values() for tensor in pair)
    assert taken == cache.slots * cache.length * room.bytes_per_token(case.model)
    assert room.sampler_room(case.model) == {}


@pytest.mark.parametrize(("free", "tokens"), [(0, 1 << 14), (70 * 2**30, 1 << 17), (2**50, 1 << 19)])
def test_a_cache_takes_a_share_of_the_free_memory(free: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-1.7B: 28 layers of 8 heads of keys and values, 128 wide, in bfloat16."""
    sizes = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**sizes))
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, config=config)
    assert room.bytes_per_token(model) == 114_688
    monkeypatch.setattr(room, "memory_room", lambda device: free + 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**30)
    assert room.sampler_room(model) == {"rows": 256, "cache_tokens": tokens}


def test_no_more_completions_are_drawn_at_once_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(tmp_path, ("lora",), torch.float32, num_hidden_layers=1)
    monkeypatch.setattr(drawing, "sampler_room", lambda model: {"rows": 3, "cache_tokens": 512})
    base, single = SimpleNamespace(model=case.model, tokenizer=None), SimpleNamespace(attached=case.attached)
    sampler = drawing.Drawing(base, single, threading.Event()).sampler()  # type: ignore[arg-type]
    for number in range(4):
        sampler.submit(SampleRequest(prompt(number, 5), max_tokens=3, num_samples=2))
    most, tokens = 0, 0
    while sampler.waiting:
        tokens += len(sampler.step())
        most = max(most, len(sampler._running))
    assert (most, tokens, sampler.cache_tokens) == (3, 24, 512)
