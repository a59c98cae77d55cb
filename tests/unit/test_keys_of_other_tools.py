"""Keys as Axolotl, TRL, Unsloth, LLaMA-Factory and the Hugging Face Trainer call them are refused with what stands for them
here, and a page of docs says the same."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from packlora.config import Run
from packlora.config.other_tools import OTHER_TOOLS
from packlora.errors import InputError
from packlora.run_file import run_from
from packlora.run_file_errors import unknown_key


def refusal(job: dict[str, Any], run: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        run_from({"base_model": "m", "output_dir": "o", "jobs": [{"name": "a", "data": {"path": "d"}} | job]} | run)
    return str(caught.value)


@pytest.mark.parametrize(
    ("part", "key", "here"),
    [
        ("adapter", "rank", "adapter.r"),
        ("adapter", "lora_r", "adapter.r"),
        ("train", "lr", "train.learning_rate"),
        ("train", "gradient_accumulation_steps", "train.global_batch_size"),
        ("train", "optimizer", "train.optim"),
        ("run", "sequence_len", "data.max_length"),
        ("run", "bf16", "dtype: bfloat16"),
        ("run", "load_in_4bit", "quantization: nf4"),
        ("run", "load_in_8bit", "quantization: int8"),
        ("run", "compile", "cuda_graphs"),
        ("train", "torch_compile", "cuda_graphs"),
        ("run", "ep_size", "parallel: {expert: N}"),
        ("run", "val_set_size", "data.eval_path"),
        ("run", "deepspeed", "the run's parallel"),
        ("train", "report_to", "trackers"),
        ("train", "completion_only_loss", "turns of the assistant"),
        ("adapter", "lora_target_linear", "target_modules"),
        ("rollout", "max_completion_length", "rollout.max_new_tokens"),
        ("train", "reward_funcs", "rollout.reward"),
        ("train", "activation_checkpointing", "the run's gradient_checkpointing"),
        ("train", "gradient_checkpointing_kwargs", "the run's gradient_checkpointing"),
        ("run", "wandb_name", "the run's trackers"),
        ("train", "ddp_timeout", "parallel: {timeout_s: SECONDS}"),
        ("train", "disable_dropout", "adapter.lora_dropout, 0"),
        ("adapter", "task_type", "leave it out"),
    ],
)
def test_a_key_of_another_tool_is_refused_with_what_stands_for_it_here(part: str, key: str, here: str) -> None:
    said = refusal({}, {key: 1}) if part == "run" else refusal({part: {key: 1}}, {})
    assert f"{key}: unknown key; " in said
    assert here in said
    assert "did you mean" not in said


@pytest.mark.parametrize(
    ("part", "key", "here"),
    [
        ("run", "learning_rate", "see a job's train.learning_rate"),
        ("run", "adapter", "see a job's adapter"),
        ("run", "prefer", "see the run's plans.prefer"),
        ("train", "max_length", "see a job's data.max_length"),
        ("train", "gradient_checkpointing", "see the run's gradient_checkpointing"),
        ("adapter", "seed", "see a job's seed"),
        ("train", "num_generations", "see a job's rollout.num_generations"),
    ],
)
def test_a_key_in_the_wrong_place_is_refused_with_its_place(part: str, key: str, here: str) -> None:
    said = refusal({}, {key: 1}) if part == "run" else refusal({part: {key: 1}}, {})
    assert f"{key}: unknown key; {here}" in said


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("train", "hub_revision"),
        ("train", "disable_tqdm"),
        ("run", "use_adaptive_entropy"),
        ("adapter", "layer_replication"),
    ],
)
def test_a_key_that_means_something_else_is_not_taken_for_a_slip(part: str, key: str) -> None:
    said = refusal({}, {key: 1}) if part == "run" else refusal({part: {key: 1}}, {})
    assert f"{key}: unknown key; known keys are " in said


def test_a_share_of_the_steps_as_warm_up_is_refused_with_its_key() -> None:
    """Newer versions of transformers have warmup_steps alone, below 1 a share."""
    said = refusal({"train": {"lr_scheduler_type": "cosine", "warmup_steps": 0.1}}, {})
    assert (
        "train.warmup_steps: input should be a valid integer; found 0.1; a share of all steps is warmup_ratio" in said
    )
    assert "warmup_ratio" not in refusal({"train": {"warmup_steps": "ten"}}, {})


def keys(model: Any) -> set[str]:
    return set(model.model_fields)


def test_what_stands_for_them_exists_and_none_of_them_is_a_key_here() -> None:
    from packlora.config import AdapterConfig, DataConfig, JobConfig, TrainConfig
    from packlora.rl.config import RolloutConfig

    parts = {"adapter": AdapterConfig, "train": TrainConfig, "data": DataConfig, "rollout": RolloutConfig}
    for key, instead in OTHER_TOOLS.items():
        assert all(key not in keys(model) for model in (Run, JobConfig, *parts.values()))
        for words in instead.split():
            part, dot, name = words.rstrip(";,").partition(".")
            assert not dot or name in keys(parts[part])
        if instead.startswith("see the run's "):
            assert instead.split()[3].rstrip(":") in keys(Run)


PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
PLACE = re.compile(r"the run's (\w+)|a job's (\w+(?:\.\w+)?)|((?:adapter|data|train)\.\w+)|another (output_dir)")


def named(text: str) -> set[str]:
    """Keys of a run file that a message names."""
    return {next(filter(None, found.groups())) for found in PLACE.finditer(text)} - {"max_tokens_per_microbatch"}


def test_the_page_for_users_of_other_tools_names_the_keys_that_refusals_name() -> None:
    """A key of the first column is refused with the keys of the second one, or is a key of the run itself."""
    listed, wrong = set(), []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        theirs = re.fullmatch(r"(?:`(\w+)`(?:, )?)+", cells[0])
        if not line.startswith("| ") or len(cells) != 3 or theirs is None:
            continue
        spans = [span.partition(":")[0] for span in re.findall(r"`([^`]+)`", cells[1])]
        here = {span for span in spans if "." in span or span in keys(Run) | {"adapter"}}
        for key in re.findall(r"\w+", cells[0]):
            listed.add(key)
            said = f"the run's {key}" if key in keys(Run) else unknown_key(key, [])
            if named(said) != here or "did you mean" in said or "known keys" in said:
                wrong.append(f"{key}: the page says {sorted(here)}, and a refusal: {said}")
    assert not wrong, "\n".join(wrong)
    assert not (missing := OTHER_TOOLS.keys() - listed), f"not on the page: {sorted(missing)}"


def test_the_defaults_of_trl_that_the_page_names_are_those_of_the_installed_one() -> None:
    """They are read where TRL documents them: it is not imported without what it depends on."""
    if (found := importlib.util.find_spec("trl")) is None or not found.submodule_search_locations:
        pytest.skip("TRL is not installed")
    files = Path(found.submodule_search_locations[0], "trainer").glob("*_config.py")
    documented = "".join(file.read_text(encoding="utf-8") for file in files)
    own = re.compile(r"^\| `(\w+)` .*? default (?:([\d.]+), as TRL's|[\d.]+; TRL's is (\d+))", re.MULTILINE)
    rows = own.findall(PAGE.read_text())
    assert len(rows) == 5
    for key, same, other in rows:
        assert (same or other) in re.findall(rf"\b{key} \([^\n]*defaults to `([^`]+)`", documented), key
