"""The run file: what is accepted, what is refused, and that the message says where and what instead."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from packlora.config import BUILT_IN, AdapterConfig, ParallelConfig, Run, TrainConfig
from packlora.errors import InputError
from packlora.run_file import load_run, parse_run

MINIMAL: dict[str, Any] = {
    "base_model": "m", "output_dir": "out", "jobs": [{"name": "first", "data": {"path": "a.jsonl"}}],
}  # fmt: skip
TEXT = """\
base_model: m
output_dir: out
jobs:
  - name: first
    data: {path: a.jsonl}
"""


def tree(job: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """The minimal run with keys of its one job and of the top level changed."""
    out = copy.deepcopy(MINIMAL)
    out["jobs"][0].update(job or {})
    return out | top


def refusal(value: Any) -> str:
    with pytest.raises(InputError) as caught:
        parse_run(value, "run.yaml")
    return str(caught.value)


def load(tmp_path: Path, text: str = TEXT, *overrides: str) -> Run:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_run(path, list(overrides))


def load_refusal(tmp_path: Path, text: str = TEXT, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


def test_defaults_are_exactly_the_documented_ones() -> None:
    documented = yaml.safe_load(
        """
        base_model: m
        revision: null
        dtype: auto
        quantization: null
        compute: dtype
        device: auto
        output_dir: out
        seed: 0
        max_tokens_per_microbatch: 4096
        gradient_checkpointing: false
        activation_offloading: false
        offload_embedding: false
        fit: memory
        save_every: 50
        save_total_limit: 2
        eval_every: 0
        trust_remote_code: false
        liger: auto
        cuda_graphs: auto
        keep_outputs: false
        plans: {plan: measured, lossy: false, prefer: time}
        parallel:
          {devices_per_job: auto, timeout_s: 600.0, pipeline: auto, tensor: 1, expert: 1,
           ep_implementation: all_reduce, sequence_parallel: false,
           shard_base: auto, offload_base: false}
        schedule: {method: auto, padding_multiple: 1, time_limit_s: 10}
        sample_prompts: []
        sample_max_new_tokens: 64
        trackers: []
        sweep: null
        jobs:
          - name: first
            data: {path: a.jsonl, eval_path: null, system: null, on_bad_row: error, max_length: 2048, truncate: error,
                   streaming: false, shuffle_buffer_size: null, columns: {}, max_samples: null, subset: null, split: null,
                   eval_split: null, chat_template: null, chat_template_kwargs: {}}
            adapter: {r: 16, lora_alpha: 32, lora_dropout: 0.05, target_modules: all-linear, use_rslora: false,
                      use_dora: false, dora_dropout: peft, bias: none, rank_pattern: {}, alpha_pattern: {}, init_from: null,
                      exclude_modules: null, layers_to_transform: null, layers_pattern: null, init_lora_weights: true,
                      modules_to_save: null, trainable_token_indices: null, target_parameters: null, expert_rank: r}
            sample_prompts: null
            seed: null
            rollout: null
            train: {global_batch_size: 8, num_train_epochs: 1, max_steps: -1, optim: adamw_torch, learning_rate: 2.0e-4,
                    lr_scheduler_type: constant, lr_scheduler_kwargs: {}, warmup_steps: 0,
                    warmup_ratio: 0.0, weight_decay: 0.0, loraplus_lr_ratio: null, label_smoothing_factor: 0.0,
                    neftune_noise_alpha: null, router_aux_loss_coef: null, max_grad_norm: 1.0,
                    adam_beta1: 0.9, adam_beta2: 0.999, adam_epsilon: 1.0e-8, logging_steps: 1, shuffle: true, drop_last: false,
                    eval_steps: null, eval_on_start: true, load_best_model_at_end: false, metric_for_best_model: eval_loss,
                    early_stopping_patience: null, early_stopping_threshold: 0.0, trainer: sft, objective: null, beta: null,
                    loss_type: null, loss_weights: null, epsilon: null, epsilon_high: null, label_smoothing: null,
                    discopop_tau: null, reference: null, desirable_weight: null, undesirable_weight: null}
        """
    )
    assert parse_run(MINIMAL, "run.yaml").model_dump(mode="json") == documented
    assert parse_run(documented, "run.yaml") == parse_run(MINIMAL, "run.yaml")


@pytest.mark.parametrize(
    ("value", "where", "hint"),
    [
        (tree(out_dir="x"), "out_dir", "did you mean 'output_dir'?"),
        (tree(base_modell="x"), "base_modell", "did you mean 'base_model'?"),
        (tree(parallel={"tensr": 1}), "parallel.tensr", "did you mean 'tensor'?"),
        (tree(schedule={"methd": "solo"}), "schedule.methd", "did you mean 'method'?"),
        (tree(quantization={"methd": "nf4"}), "quantization.methd", "did you mean 'method'?"),
        (tree({"trian": {}}), "job 'first': trian", "did you mean 'train'?"),
        (tree({"data": {"path": "a", "evalpath": "b"}}), "job 'first': data.evalpath", "did you mean 'eval_path'?"),
        (tree({"adapter": {"lora_alhpa": 16}}), "job 'first': adapter.lora_alhpa", "did you mean 'lora_alpha'?"),
        (tree({"train": {"lr_schedular_type": "linear"}}), "job 'first': train.lr_schedular_type", "lr_scheduler_type"),
        (tree({"zzz": 1}), "job 'first': zzz", "known keys are name, data, adapter, train"),
        (tree(str=1), "str", "unknown key"),  # names that pydantic also uses for the branches of a union
        (tree({"adapter": {"int": 1}}), "job 'first': adapter.int", "unknown key"),
        (tree(**{"a[b]": 1}), "a[b]", "unknown key"),
    ],
)
def test_an_unknown_key_is_refused_with_its_place_and_the_nearest_known_key(value: Any, where: str, hint: str) -> None:
    message = refusal(value)
    assert f"  {where}: unknown key" in message
    assert hint in message


def test_what_is_said_of_a_wrong_value_names_the_key_and_nothing_that_is_not_there() -> None:
    for section, model in ("", Run), ("adapter", AdapterConfig), ("train", TrainConfig), ("parallel", ParallelConfig):
        for key in model.model_fields.keys() - {"jobs"}:
            wrong = {key: [[{}]]}
            message = refusal(
                tree({section: wrong})
                if section in ("adapter", "train")
                else tree(**({section: wrong} if section else wrong))
            )
            assert not re.search(r"\.(str|int|float|bool)\b|(list|dict|literal)\[", message), message


@pytest.mark.parametrize(
    ("value", "where", "found"),
    [
        (tree({"adapter": {"r": "16"}}), "job 'first': adapter.r", "'16'"),
        (tree({"adapter": {"r": 1.5}}), "job 'first': adapter.r", "1.5"),
        (tree({"adapter": {"target_modules": ["q", 3]}}), "job 'first': adapter.target_modules[1]", "3"),
        (tree({"adapter": {"rank_pattern": {"q": 1.5}}}), "job 'first': adapter.rank_pattern.q", "1.5"),
        (tree({"train": {"shuffle": "yes"}}), "job 'first': train.shuffle", "'yes'"),
        (tree({"train": {"learning_rate": float("inf")}}), "job 'first': train.learning_rate", "inf"),
        (tree({"name": 7}), "job number 0: name", "7"),
        (tree(jobs={"name": "first"}), "jobs", "a mapping"),
        (tree(jobs=[]), "jobs", "a list"),
        (tree(output_dir=""), "output_dir", "''"),
        (tree(liger="yes"), "liger", "'yes'"),
        (tree(dtype="fp32"), "dtype", "'fp32'"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_place_and_what_was_found(
    value: Any, where: str, found: str
) -> None:
    lines = refusal(value).splitlines()
    assert any(line.startswith(f"  {where}: input should be") or "at least 1" in line for line in lines), lines
    assert any(line.startswith(f"  {where}: ") and line.endswith(f"; found {found}") for line in lines), lines


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tree({"adapter": {"r": 0}}), "job 'first': adapter.r: input should be greater than or equal to 1; found 0"),
        (tree({"adapter": {"lora_alpha": 0}}), "adapter.lora_alpha: input should be greater than or equal to 0.000001"),
        (tree({"adapter": {"target_modules": []}}), "adapter.target_modules: is empty"),
        (tree({"adapter": {"target_modules": "(q"}}), "adapter.target_modules: has '(q', which is not a valid regular"),
        (
            tree({"adapter": {"rank_pattern": {"q": 0}}}),
            "adapter.rank_pattern.q: input should be greater",
        ),
        (
            tree({"adapter": {"alpha_pattern": {"q": -1}}}),
            "adapter.alpha_pattern.q: input should be greater",
        ),
        (tree({"adapter": {"bias": "some"}}), "adapter.bias: input should be 'none', 'all' or 'lora_only'"),
        (tree({"train": {"learning_rate": 0}}), "train.learning_rate: input should be greater than 0; found 0"),
        (tree({"train": {"max_steps": 0}}), "train: max_steps is 0, so nothing would be trained"),
        (tree({"train": {"lr_scheduler_type": "cosin"}}), "train.lr_scheduler_type: input should be 'constant', "),
        (tree({"train": {"warmup_steps": 5}}), "train: warmup_steps is 5, but the schedule 'constant' has no warm-up"),
        (tree({"data": {"path": "a", "max_length": 1}}), "data.max_length: input should be greater than or equal to 2"),
        (
            tree({"data": {"path": "a", "truncate": "left"}}),
            "data.truncate: input should be 'error', 'drop' or 'right'",
        ),
        (tree({"data": {"path": ""}}), "data.path: string should have at least 1 character"),
        (tree({"data": {}}), "job 'first': data.path: is missing"),
        (tree(max_tokens_per_microbatch=1), "max_tokens_per_microbatch: is 1; give auto or a number of tokens"),
        (tree(seed=-1), "seed: input should be greater than or equal to 0"),
        (
            tree({"name": "best"}, sweep={"job": "best", "parameters": {"adapter.r": [4, 8]}}),
            "a sweep itself uses 'best' in output_dir",
        ),
        (tree(schedule={"method": "best"}), "schedule.method: input should be 'auto', 'greedy', 'milp' or 'solo'"),
        (tree(schedule={"padding_multiple": 64}), "schedule.padding_multiple: input should be less than or equal to 1"),
        (tree(schedule={"time_limit_s": 1e-320}), "schedule.time_limit_s: input should be greater than or equal to"),
        (tree(parallel={"timeout_s": 0}), "parallel.timeout_s: input should be greater than or equal to 1; found 0"),
        (tree(parallel={"timeout_s": 1e300}), "parallel.timeout_s: input should be less than or equal to 1000000"),
        (
            tree(parallel={"expert": 2, "tensor": 2, "devices_per_job": 2}),
            "devices_per_job is 2, but 4 devices hold the base model together (tensor times expert)",
        ),
        (
            tree(parallel={"expert": 2, "pipeline": 3, "ep_implementation": "all_to_all"}),
            "parallel: pipeline is 3 and ep_implementation is all_to_all, by which",
        ),
        (
            tree(parallel={"ep_implementation": "all_to_all"}),
            "parallel: ep_implementation is all_to_all, which goes with expert",
        ),
        (
            tree(parallel={"expert": 2, "shard_base": 2, "devices_per_job": 6}),
            "devices_per_job is 6, but 4 devices hold the base model together (expert times shard_base)",
        ),
        (tree(parallel={"expert": 2, "offload_base": True}), "parallel: offload_base is true and shard_base is auto"),
        (
            tree(parallel={"expert": 2, "devices_per_job": 3}),
            "devices_per_job is 3, but 2 devices hold the base model together (expert)",
        ),
        (tree(parallel={"sequence_parallel": True}), "parallel: sequence_parallel goes with tensor"),
        (
            tree(parallel={"offload_base": True}),
            "parallel: offload_base is true and shard_base is auto, but what is kept on",
        ),
        (tree(parallel={"shard_base": 1}), "parallel: shard_base is 1; give true, false, auto or a number of devices"),
        (tree(parallel={"pipeline": 2, "shard_base": 2}), "parallel: pipeline is 2 and shard_base is 2, two ways"),
        (
            tree(parallel={"tensor": 2, "shard_base": 2, "devices_per_job": 2}),
            "but 4 devices hold the base model together",
        ),
        (tree(parallel={"tensor": 2, "devices_per_job": 3}), "devices_per_job is 3, but 2 devices hold the base model"),
        (tree(parallel={"devices_per_job": 0}), "devices_per_job is 0; give auto or a number of devices, at least 1"),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_is_accepted(value: Any, message: str) -> None:
    assert message in refusal(value)


def test_parallel_and_schedule_at_their_defaults_are_accepted() -> None:
    assert parse_run(tree(parallel={"tensor": 1}, schedule={"method": "solo"}), "run.yaml").schedule.method == "solo"


@pytest.mark.parametrize("method", ["auto", "greedy", "milp", "solo"])
def test_every_method_of_the_scheduler_is_accepted_with_its_limits(method: str) -> None:
    value = tree(schedule={"method": method, "padding_multiple": 1, "time_limit_s": 2.5})
    assert parse_run(value, "run.yaml").schedule.model_dump() == value["schedule"]


def test_a_warmup_is_accepted_with_every_schedule_that_has_one() -> None:
    for name in ("constant_with_warmup", "linear", "cosine", "polynomial", "inverse_sqrt"):
        value = tree({"train": {"warmup_steps": 5, "lr_scheduler_type": name}})
        assert parse_run(value, "run.yaml").jobs[0].train.warmup_steps == 5


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "a\\b", ".", "..", "", "a b", " a", "a\n", "a\0b", "é", "a:b", "x" * 101]
)
def test_a_name_that_is_no_safe_folder_name_is_refused(name: str) -> None:
    message = refusal(tree({"name": name}))
    assert f"name: is {name!r}, which cannot be a folder name" in message


@pytest.mark.parametrize("name", ["run.json", "Metrics.jsonl", "report.html", "pipeline.jsonl", ".tmp-a"])
def test_a_name_that_packlora_uses_in_the_output_folder_is_refused(name: str) -> None:
    assert f"is {name!r}, which packlora itself uses" in refusal(tree({"name": name}))


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "...", ".hidden", "-x", "x" * 100])
def test_a_safe_name_is_accepted(name: str) -> None:
    assert parse_run(tree({"name": name}), "run.yaml").jobs[0].name == name


@pytest.mark.parametrize("other", ["first", "First", "FIRST"])
def test_two_jobs_of_one_name_are_refused_also_when_only_case_differs(other: str) -> None:
    value = tree()
    value["jobs"].append({"name": other, "data": {"path": "b.jsonl"}})
    message = refusal(value)
    assert f"{other!r} is used twice" in message
    assert "'first'" in message


def test_all_problems_are_listed_at_once_each_with_its_job() -> None:
    value = tree({"adapter": {"r": 0, "lora_alhpa": 1}}, sede=1)
    value["jobs"].append({"name": "second", "data": {"path": 3}, "train": {"learning_rate": -1}})
    lines = refusal(value).splitlines()
    assert lines[0] == "run.yaml:"
    starts = ["job 'first': adapter.r:", "job 'first': adapter.lora_alhpa:", "sede:", "job 'second': data.path:",
              "job 'second': train.learning_rate:"]  # fmt: skip
    assert len(lines) == 1 + len(starts)
    for start in starts:
        assert sum(line.startswith(f"  {start}") for line in lines) == 1, start


# --- YAML --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "rate"),
    [
        ("{}", 2e-4), ("{trainer: dpo}", 5e-6), ("{loss_type: kto}", 5e-6), ("{trainer: dpo, loss_type: [sigmoid, sft]}", 5e-6),
        ("{loss_type: orpo, learning_rate: null}", 5e-6), ("{trainer: dpo, learning_rate: 2e-4}", 2e-4),
    ],
)  # fmt: skip
def test_the_usual_learning_rate_is_the_trainer_s_and_one_that_is_given_wins(
    tmp_path: Path, train: str, rate: float
) -> None:
    (job,) = load(tmp_path, TEXT + f"    train: {train}\n").jobs
    assert job.train.learning_rate == rate == job.model_dump(mode="json")["train"]["learning_rate"]
    job.train.warmup_ratio = 0.0  # an assignment checks all keys again
    assert job.train.learning_rate == rate


def test_the_end_of_a_schedule_is_compared_with_the_trainer_s_learning_rate(tmp_path: Path) -> None:
    low = "lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1e-5}"
    assert load(tmp_path, TEXT + f"    train: {{{low}}}\n").jobs[0].train.learning_rate == 2e-4
    assert "over the learning rate, 5e-06" in load_refusal(tmp_path, TEXT + f"    train: {{trainer: dpo, {low}}}\n")


def test_a_quoted_number_stays_a_text(tmp_path: Path) -> None:
    assert "found '2e-4'" in load_refusal(tmp_path, TEXT + "    train: {learning_rate: '2e-4'}\n")


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        (TEXT + "output_dir: other\n", 6, "output_dir"),
        (TEXT + "    train: {max_steps: 1, max_steps: 2}\n", 6, "max_steps"),
        (TEXT + "    adapter:\n      r: 4\n      r: 4\n", 8, "r"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path, text: str, line: int, key: str) -> None:
    assert (
        load_refusal(tmp_path, text) == f"{tmp_path}/run.yaml, line {line}: the key {key!r} stands here a second time"
    )


def test_a_merge_key_may_be_overridden(tmp_path: Path) -> None:
    text = TEXT + "    train: &t {max_steps: 3, learning_rate: 1e-3}\n"
    text += "  - {name: b, data: {path: b}, train: &u {<<: *t, max_steps: 5}}\n"
    text += "  - {name: c, data: {path: c}, train: {<<: *u, max_steps: 7}}\n"
    jobs = load(tmp_path, text).jobs
    assert [job.train.max_steps for job in jobs] == [3, 5, 7]
    assert [job.train.learning_rate for job in jobs] == [1e-3] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found nothing"), ("- 1\n", "found a list"), ("just text\n", "found a text"), ("a: [1\n", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"), ("seed: {{ seed }}\n", "not valid YAML"), ("a: \x01\n", "not valid YAML"),
        ("a: !!python/name:os.system\n", "not valid YAML"), ("a: *b\n", "not valid YAML"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_mapping_in_YAML_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    found = load_refusal(tmp_path, text)
    assert message in found
    assert str(tmp_path / "run.yaml") in found


def test_a_run_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("base_model: caf\xe9".encode("latin-1"))
    for path in (tmp_path / "missing.yaml", tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(InputError, match="cannot read the run file") as caught:
            load_run(path)
        assert str(path) in str(caught.value)


def test_relative_paths_are_found_beside_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (tmp_path / "a.jsonl").write_text("")
    assert load(tmp_path).jobs[0].data.path == str(tmp_path / "a.jsonl")
    (elsewhere / "a.jsonl").write_text("")  # the current folder comes first
    assert load(tmp_path).jobs[0].data.path == "a.jsonl"


# --- --set -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", ["0", "first"])
def test_an_override_reaches_a_job_by_number_and_by_name_and_makes_missing_mappings(tmp_path: Path, job: str) -> None:
    run = load(tmp_path, TEXT, f"jobs.{job}.train.learning_rate=1e-4", f"jobs.{job}.adapter.rank_pattern.q_proj=3")
    assert run.jobs[0].train.learning_rate == 1e-4
    assert run.jobs[0].adapter.rank_pattern == {"q_proj": 3}


def test_override_values_have_the_types_of_YAML(tmp_path: Path) -> None:
    run = load(
        tmp_path, TEXT, "seed=7", "gradient_checkpointing=true", "output_dir=a=b", "revision=null",
        "jobs.0.adapter.target_modules=[q_proj, v_proj]", "jobs.0.train={max_steps: 3}", "max_tokens_per_microbatch=auto",
    )  # fmt: skip
    assert (run.seed, run.gradient_checkpointing, run.output_dir, run.revision) == (7, True, "a=b", None)
    assert run.jobs[0].adapter.target_modules == ["q_proj", "v_proj"]
    assert (run.jobs[0].train.max_steps, run.max_tokens_per_microbatch) == (3, "auto")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "write it as dotted.key=value"), ("=3", "write it as dotted.key=value"),
        ("jobs..name=x", "write it as dotted.key=value"), ("jobs.1.name=x", "there is no item '1'; there are 1"),
        ("jobs.-1.name=x", "there is no item '-1'"), ("jobs.second.name=x", "there are 1, counted from 0: first"),
        ("jobs.²=x", "there is no item '²'"), ("base_model.x=1", "base_model is a text and has no key 'x'"),
        ("seed=[1", "--set seed is not valid YAML"), ("seed={{x}}", "--set seed is not valid YAML"),
        ("seed=", "seed: input should be a valid integer; found None"), ("seed=1.5", "found 1.5"),
        ("jobs.first.trian.max_steps=1", "job 'first': trian: unknown key; did you mean 'train'?"),
    ],
)  # fmt: skip
def test_an_override_that_cannot_be_applied_is_refused(tmp_path: Path, override: str, message: str) -> None:
    assert message in load_refusal(tmp_path, TEXT, override)


@pytest.mark.parametrize(
    ("keys", "trainer", "losses"),
    [
        ({"loss_type": "sft"}, "sft", ()),
        ({"loss_type": "dpo"}, "dpo", ("sigmoid",)),
        ({"loss_type": "orpo"}, "orpo", ()),
        ({"loss_type": "kto"}, "kto", ("kto",)),
        ({"loss_type": "dpo", "trainer": "dpo"}, "dpo", ("sigmoid",)),
        ({"loss_type": "sft", "trainer": "dpo"}, "dpo", ("sft",)),  # TRL's own
        ({"loss_type": "kto", "trainer": "kto"}, "kto", ("kto",)),
        ({"loss_type": ["sigmoid", "sft"], "trainer": "dpo"}, "dpo", ("sigmoid", "sft")),
    ],
)
def test_a_loss_that_is_named_after_a_trainer_sets_it_where_none_is_written(
    keys: dict[str, Any], trainer: str, losses: tuple[str, ...]
) -> None:
    train = parse_run(tree({"train": keys}), "run.yaml").jobs[0].train
    assert (train.trainer, train.loss_types) == (trainer, losses)
    again = TrainConfig.model_validate_json(train.model_dump_json())
    assert again == train
    train.learning_rate = 1e-3  # values that are set are checked again
    assert train.trainer == trainer


def test_no_two_objectives_declare_one_key_and_none_that_all_have() -> None:
    """The later of two would be the key of both."""
    own = [key for declared in BUILT_IN.values() for key in declared.keys.model_fields]
    (common,) = (kind for kind in TrainConfig.__mro__ if kind.__name__ == "_Common")
    assert "learning_rate" in common.model_fields  # type: ignore[attr-defined]
    assert len(own) == len(set(own)) and not common.model_fields.keys() & set(own)  # type: ignore[attr-defined]
