"""Embeddings, output layers, copies and rows of tokens on several processes: shared out, or refused before training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import rows_into, tiny_model
from ranks import Ranks
from test_any_module_run import JOBS, tensors, tree
from test_replicas import on_ranks

import packlora
from packlora.config import Run
from packlora.errors import InputError
from packlora.parallel.layout import Layout
from packlora.runtime import estimate, profiler
from packlora.runtime.choose import needed_bytes, spread
from packlora.runtime.prepare import prepare

COPIES = ("base_model.model.lm_head.weight", "base_model.model.model.norm.weight")


@pytest.fixture(scope="module")
def whole(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run file of a run of all jobs that one process has trained, on a base whose ends are not tied."""
    folder = tmp_path_factory.mktemp("modules")
    tiny_model("llama").save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    asked = tree(str(folder / "base"), folder / "one", rows_into(folder), list(JOBS), dtype="float64")
    asked |= {"sample_prompts": ["the quick"], "sample_max_new_tokens": 2}
    packlora.train(Run.model_validate(asked))
    return asked


@pytest.mark.parametrize("parallel", [pytest.param({"devices_per_job": 2}, marks=pytest.mark.soak), {"pipeline": 2}])
def test_two_processes_give_what_one_process_gives(
    parallel: dict[str, int], whole: dict[str, Any], ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """Replicas that share jobs; stages, of which the first has the embedding, and the last the norm and the output layer."""
    both = whole | {"output_dir": str(tmp_path / "two"), "parallel": parallel}
    assert [status for status, *_ in ranks(2).run(on_ranks, both, {})] == ["done", "done"]
    for job in JOBS:
        mine, other = tensors(tmp_path / "two" / job), tensors(Path(whole["output_dir"]) / job)
        assert mine.keys() == other.keys()
        for key, tensor in other.items():
            assert float((mine[key] - tensor).abs().max()) < 1e-10, (job, key)
    texts = [
        sorted((one / "samples.jsonl").read_text().splitlines())
        for one in (tmp_path / "two", Path(whole["output_dir"]))
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 2 * len(JOBS)


def test_what_is_on_an_end_of_the_model_is_predicted_to_be_on_one_stage(whole: dict[str, Any]) -> None:
    """A job with copies of the output layer and of the last norm beside one with as little in layers."""

    def needed(name: str) -> int:
        jobs = [job for job in whole["jobs"] if job["name"] == name]
        prepared = prepare(Run.model_validate({**whole, "jobs": jobs}))
        planned = spread(prepared, Layout(((name,),), pipeline=2))
        return needed_bytes(prepared, profiler.profile(prepared.run, prepared), planned)

    at_ends = sum(tensors(Path(whole["output_dir"]) / "copies")[key].numel() for key in COPIES)
    assert needed("copies") - needed("plain") > 0.9 * estimate.TRAINABLE_BYTES * at_ends


def test_rows_of_an_embedding_and_of_an_output_layer_that_is_tied_to_it_are_not_trained_in_stages(
    tokenizer: Any, tmp_path: Path
) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    changes = {"parallel": {"pipeline": 2}}
    asked = tree(str(tmp_path / "base"), tmp_path / "out", rows_into(tmp_path), ["embedding", "tokens"], **changes)
    with pytest.raises(InputError) as caught:
        prepare(Run.model_validate(asked))
    wanted = "job 'tokens': it trains rows of the embedding, to which lm_head is tied on another stage, which parallel"
    assert str(caught.value).startswith(f"{wanted}.pipeline does not take")


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"parallel": {"tensor": 2}}, "parallel.tensor"), ({"parallel": {"shard_base": True}}, "parallel.shard_base")],
)
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
