"""A base model that is served over two GPUs: what models and samples have there they have on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import served_cut
import torch
from ranks import Ranks
from serving import NAME, Talk, host_of
from test_serve_cut import end, same

from packlora.serve.service import Service

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_models_and_samples_of_a_base_on_two_gpus_are_those_of_one(
    tiny_base: Callable[[str], str], tmp_path: Path
) -> None:
    base, states = tiny_base("llama"), [tmp_path / name for name in ("one", "two")]
    for state in states:
        state.mkdir()
    talk = Talk(Service({NAME: host_of(base, states[0], "device=cuda", "dtype=float64", budget=64)}, states[0]))
    want, _ = served_cut.whole(talk)
    end(talk)
    two = Ranks(2, "cuda")
    found = two.run(served_cut.told, 2, base, states[1], "cuda")[0]
    two.close()
    assert "no memory for another adapter" in found.pop("large") and found.pop("refused")
    same(found, want)
