"""Embeddings, output layers, copies and rows of tokens on several processes: shared out, or refused before training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import rows_into
from ranks import Ranks
from test_any_module_run import JOBS, tensors, tree
from test_replicas import on_ranks

import packlora
from packlora.config import Run
from packlora.errors import InputError
from packlora.runtime.prepare import prepare


def test_replicas_that_share_jobs_give_what_one_process_gives(
    tiny_base: Callable[[str], str], ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    asked = tree(tiny_base("llama"), tmp_path / "one", rows_into(tmp_path), list(JOBS), dtype="float64")
    packlora.train(Run.model_validate(asked))
    both = asked | {"output_dir": str(tmp_path / "two"), "parallel": {"devices_per_job": 2}}
    assert [status for status, *_ in ranks(2).run(on_ranks, both, {})] == ["done", "done"]
    for job in JOBS:
        mine, other = tensors(tmp_path / "two" / job), tensors(tmp_path / "one" / job)
        assert mine.keys() == other.keys()
        for key, tensor in other.items():
            assert float((mine[key] - tensor).abs().max()) < 1e-10, (job, key)


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"parallel": {"tensor": 2}}, "parallel.tensor"), ({"parallel": {"pipeline": 2}}, "parallel.pipeline"),
     ({"parallel": {"shard_base": True}}, "parallel.shard_base")],
)  # fmt: skip
@pytest.mark.parametrize(
    ("job", "path"),
    [("head", "lm_head"), ("embedding", "model.embed_tokens"), ("copies", "model.layers.0.input_layernorm")],
)
def test_layouts_that_take_the_model_apart_refuse_them_by_name(
    changes: dict[str, Any], key: str, job: str, path: str, tiny_base: Callable[[str], str], tmp_path: Path
) -> None:
    asked = tree(tiny_base("llama"), tmp_path / "out", rows_into(tmp_path), ["plain", job], **changes)
    with pytest.raises(InputError) as caught:
        prepare(Run.model_validate(asked))
    assert str(caught.value).startswith(f"job '{job}': {path} is trained, outside of the linear layers")
    assert f"which {key} does not take" in str(caught.value)


def test_a_copy_of_a_quantised_layer_and_transposed_weights_are_refused(
    tiny_base: Callable[[str], str], tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    asked = tree(tiny_base("llama"), tmp_path / "out", rows_into(tmp_path), ["plain"], quantization="nf4")
    asked["jobs"][0]["adapter"] = {"target_modules": ["v_proj"], "modules_to_save": ["q_proj"]}
    with pytest.raises(
        InputError, match=r"'plain': a copy of model\.layers\.0\.self_attn\.q_proj is trained, which quantiz"
    ):
        prepare(Run.model_validate(asked))
