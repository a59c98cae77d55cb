"""The fingerprint of a base model: every bit of every weight counts, and nothing else does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import tiny_model

from packlora.base.fingerprint import fingerprint, word_sum


def by_bytes(tensor: torch.Tensor) -> int:
    """The sum of 64-bit words, in Python's integers."""
    octets = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    return sum(int.from_bytes(octets[n : n + 8], "little") for n in range(0, len(octets), 8)) % 2**64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_the_word_sum_is_that_of_python_s_integers_for_any_size_and_layout(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((), (0,), (1,), (3,), (5, 7), (8, 16), (257,)):
        tensor = (torch.randn(shape, generator=generator) * 50).to(dtype)
        assert word_sum(tensor) == by_bytes(tensor), shape
    tensor = (torch.randn((9, 6), generator=generator) * 50).to(dtype)
    for view in (tensor[1:], tensor[:, 1:], tensor.T, tensor.reshape(-1)[1:]):
        assert word_sum(view) == by_bytes(view)


def test_any_flipped_bit_and_a_swap_of_tensors_change_it_and_another_load_does_not(
    tiny_base: Callable[[str], str],
) -> None:
    model, path = tiny_model("llama", torch.bfloat16), tiny_base("llama")
    before = fingerprint(model, path, None)
    assert fingerprint(tiny_model("llama", torch.bfloat16), path, None) == before
    generator = torch.Generator().manual_seed(1)
    weights = dict(model.named_parameters())
    for weight in weights.values():
        bits = weight.detach().view(torch.int16).view(-1)
        place = int(torch.randint(bits.numel(), (1,), generator=generator))
        bit = 1 << int(torch.randint(15, (1,), generator=generator))
        bits[place] ^= bit
        assert fingerprint(model, path, None).weights != before.weights
        bits[place] ^= bit
    assert fingerprint(model, path, None) == before
    one, two = (weights[f"model.layers.{n}.mlp.up_proj.weight"].data for n in (0, 1))
    one[:], two[:] = two.clone(), one.clone()
    assert fingerprint(model, path, None).weights != before.weights


def test_every_key_of_the_configuration_counts_but_those_that_say_who_wrote_it(
    tiny_base: Callable[[str], str], tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(tiny_base("llama"), folder)
    model, file = tiny_model("llama"), folder / "config.json"
    before = fingerprint(model, str(folder), None)
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "rope_theta": 77.0}))
    assert fingerprint(model, str(folder), None).config != before.config
    file.write_text(json.dumps(dict(reversed({**settings, "transformers_version": "1", "_name_or_path": "x"}.items()))))
    assert fingerprint(model, str(folder), None) == before
