"""Jobs that learn from rewards, by the run file: together and alone, interrupted and resumed, beside completions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import WORDS
from peft import PeftModel
from test_training import adapter, distance, steps, train

import packlora
from packlora.commands.plan import print_plan
from packlora.errors import InputError
from packlora.report.page import whole_page
from packlora.rl.courses import Turn
from packlora.rl.drawing import Drawing
from packlora.run_file import run_from

REWARDS = """
def brevity(prompts, completions, **columns):
    return [-float(len(text.split())) for text in completions]

def wanted(prompts, completions, word, **columns):
    return [float(text.split().count(one)) for text, one in zip(completions, word)]

async def later(prompts, completions, **columns):
    return [float(text.count("o")) for text in completions]
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Rewards, and prompts."""
    rewards, prompts = tmp_path / "rewards.py", tmp_path / "prompts.jsonl"
    rewards.write_text(REWARDS)
    lines = [{"prompt": " ".join(WORDS[n : n + 2 + n % 3]), "word": WORDS[n % 4]} for n in range(6)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(rewards), str(prompts)


def four_prompts(folder: Path) -> tuple[str, str]:
    """Files of rewards, and of prompts of two words."""
    (folder / "rewards.py").write_text(REWARDS)
    lines = [{"prompt": f"the {word}"} for word in ("fox", "dog", "quick", "lazy")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder / "rewards.py"), str(folder / "prompts.jsonl")


def job(name: str, files: tuple[str, str], reward: str = "brevity", seed: int = 1, **train_keys: Any) -> dict[str, Any]:
    rollout = {"reward": f"{files[0]}:{reward}", "num_generations": 4, "max_new_tokens": 6}
    rollout |= {
        key: train_keys.pop(key)
        for key in ("max_staleness", "reward_timeout", "scale_rewards", "teacher", "teacher_weight", "log_completions")
        if key in train_keys
    }
    if reward == "none":
        del rollout["reward"]
    keys = {"loss_type": "dapo", "global_batch_size": 8, "learning_rate": 1e-2, "max_steps": 4} | train_keys
    return {
        "name": name, "data": {"path": files[1]}, "adapter": {"r": 4, "target_modules": ["q_proj", "down_proj"]},
        "seed": seed, "rollout": rollout, "train": keys,
    }  # fmt: skip


def tree(base: str, out: Path, *jobs: dict[str, Any], **more: Any) -> dict[str, Any]:
    common = {"base_model": base, "output_dir": str(out), "device": "cpu", "dtype": "float32", "save_every": 1}
    return common | {"max_tokens_per_microbatch": 128, "jobs": list(jobs)} | more


def of_job(out: Path, name: str) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "elapsed")}
        for line in steps(out)
        if line.get("job") == name
    ]


def test_a_job_that_continues_an_adapter_goes_on_after_a_stop(
    files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    """With a dropout that the folder says, 0, and the run file does not."""
    base, first = tiny_base("shallow"), job("first", files, "later", max_steps=1)
    train(tree(base, tmp_path / "first", first))
    own = job("own", files, "later", max_steps=2) | {"adapter": {"init_from": str(tmp_path / "first" / "first")}}
    train(tree(base, tmp_path / "whole", own))
    parts = tree(base, tmp_path / "parts", own)
    train(parts, max_steps=1)
    train(parts, resume=True)
    assert distance(adapter(tmp_path / "parts", "own"), adapter(tmp_path / "whole", "own")) == 0
    own["adapter"]["lora_dropout"] = 0.1
    with pytest.raises(
        InputError, match=r"its adapter has lora_dropout 0\.1, so that what is trained would not be what"
    ):
        train(tree(base, tmp_path / "dropped", own))


@pytest.mark.slow
def test_two_jobs_give_together_and_alone_and_interrupted_the_same_bits(
    files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = job("brief", files), job("foxes", files, "later", 2, loss_type="grpo", beta=0.1, max_staleness=2)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "the", "completion": f" {word}"}) + "\n" for word in WORDS[:6]))
    texts = {
        "name": "texts", "data": {"path": str(rows)}, "adapter": {"r": 4, "lora_dropout": 0.1},
        "train": {"global_batch_size": 2, "max_steps": 3},
    }  # fmt: skip
    together = tree(tiny_base("llama"), tmp_path / "together", first, second, texts)
    result = train(together)
    assert result.status == "done"
    for own in (first, second):
        train(tree(tiny_base("llama"), tmp_path / own["name"], own))
        name = own["name"]
        assert distance(adapter(tmp_path / "together", name), adapter(tmp_path / name, name)) == 0
        assert [line["reward"] for line in of_job(tmp_path / "together", name)] == [
            line["reward"] for line in of_job(tmp_path / name, name)
        ]
    parts = together | {"output_dir": str(tmp_path / "parts")}
    train(parts, max_steps=1)
    train(parts, resume=True, max_steps=3)
    with Path(files[0]).open("a") as rewards:
        rewards.write("# a comment\n")
    capsys.readouterr()
    train(parts, resume=True)
    assert "its rewards have changed since step 3" in capsys.readouterr().out
    for name in ("brief", "foxes", "texts"):
        assert distance(adapter(tmp_path / "parts", name), adapter(tmp_path / "together", name)) == 0
    last = of_job(tmp_path / "together", "foxes")[-1]
    assert last["rollout/staleness"] == 2 and last["kl"] > 0
    assert last["sampling/sampling_logp_difference/mean"] < 1e-4
    drawn = json.loads((tmp_path / "together" / "brief" / "rollouts" / "step-4.json").read_text())["completions"]
    best = max(drawn, key=lambda one: one["reward"])["text"]
    page = whole_page(tmp_path / "together")
    assert "Completions</h2>" in page and f"<span class='said'>{escape(best)}</span>" in page


def test_a_base_that_may_end_completions_elsewhere_is_no_other_place_of_the_same_one(
    files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    """Its generation_config.json, which no hash holds, says where completions end."""
    asked = tree(tiny_base("llama"), tmp_path / "out", job("brief", files))
    train(asked, max_steps=1)
    moved = shutil.copytree(tiny_base("llama"), tmp_path / "moved")
    with pytest.raises(InputError, match=r"other settings, .* base_model changed; put that back"):
        train(asked | {"base_model": str(moved)}, resume=True)


def test_a_sampler_that_is_not_the_model_ends_the_job(
    files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one with another adapter than the one that is trained."""
    original = Drawing.course

    def wrong(self: Any, drawn: Any) -> Any:
        for found in original(self, drawn):
            factor = 1.5 if drawn.step > 0 and isinstance(found, Turn) else 1.0
            drawn.job.adapter.flat.mul_(factor)
            yield found
            drawn.job.adapter.flat.div_(factor)

    monkeypatch.setattr(Drawing, "course", wrong)
    asked = job("brief", files, learning_rate=0.1)
    result = train(tree(tiny_base("llama"), tmp_path / "out", asked))
    assert result["brief"].status == "failed" and "more than rounding" in str(result["brief"].failure)


def test_a_function_in_python_is_given_the_columns_of_its_row_and_changes_what_is_written(
    files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    seen: list[dict[str, Any]] = []

    def reward(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        seen.append({"prompts": prompts, **columns})
        return [float(len(text)) for text in completions]

    rows = [json.loads(line) for line in Path(files[1]).read_text().splitlines()]
    keys = {
        "num_generations": 4,
        "max_new_tokens": 6,
        "reward": [reward, f"{files[0]}:brevity"],
        "reward_weights": [1, 2],
    }
    own = packlora.Job(
        "mine", data=rows, adapter={"r": 4}, rollout=keys, loss_type="dr_grpo", global_batch_size=8, max_steps=1
    )
    result = packlora.Trainer(tiny_base("llama"), jobs=[own], output_dir=str(tmp_path / "out"), device="cpu").train()
    assert result["mine"].status == "done"
    assert len(seen) == 2 and {len(set(one["word"])) for one in seen} == {1} and len(seen[0]["prompts"]) == 4
    (line,) = of_job(tmp_path / "out", "mine")
    parts = line["rewards/reward/mean"] + 2 * line["rewards/brevity/mean"]
    assert line["reward"] == pytest.approx(parts)
    tree = json.loads((tmp_path / "out" / "mine" / "rollouts" / "step-1.json").read_text())
    groups = [tree["completions"][first : first + 4] for first in (0, 4)]
    for group in groups:
        rewards = torch.tensor([one["reward"] for one in group], dtype=torch.float64)
        wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-4)  # as TRL's GRPOTrainer has it
        torch.testing.assert_close(torch.tensor([one["advantage"] for one in group]).double(), wanted)


def divergence(model: Any, name: str | None, tokenizer: Any, prompts: list[str]) -> float:
    """Mean divergence of an adapter, or of the base model, from the first adapter, of the token after each of the prompts'."""
    total = 0.0
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.no_grad():
            model.set_adapter("default")
            wanted = model(ids).logits[0].double().log_softmax(-1)
            if name is not None:
                model.set_adapter(name)
            with model.disable_adapter() if name is None else nullcontext():
                own = model(ids).logits[0].double().log_softmax(-1)
        total += float((own.exp() * (own - wanted)).sum(-1).mean())
    return total / len(prompts)


def test_an_adapter_learns_from_a_teacher_what_it_says_of_its_own_completions(
    files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    """The teacher is an adapter that has learnt a word. Its log-probabilities are PEFT's; the divergence from it falls."""
    base, rows = tiny_base("llama"), tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": word, "completion": " fox fox fox"}) + "\n" for word in WORDS[:6]))
    knows = {"name": "knows", "data": {"path": str(rows)}, "train": {"max_steps": 8, "learning_rate": 1e-2}}
    train(tree(base, tmp_path / "first", knows))
    folder = str(tmp_path / "first" / "knows")
    own = job(
        "pupil", files, "none", loss_type="importance_sampling", global_batch_size=48, max_steps=12, teacher=folder
    )
    own["rollout"]["num_generations"] = 8
    beside = job("plain", files, "brevity", 2, teacher="base", teacher_weight=0.5, max_steps=1)
    assert train(tree(base, tmp_path / "out", own, beside)).status == "done"

    taught = PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), folder).eval()
    taught.load_adapter(str(tmp_path / "out" / "pupil"), "pupil")
    prompts = [json.loads(line)["prompt"] for line in Path(files[1]).read_text().splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    for name, judge in (("pupil", nullcontext), ("plain", taught.disable_adapter)):
        first = json.loads((tmp_path / "out" / name / "rollouts" / "step-1.json").read_text())["completions"][0]
        ids = tokenizer(prompts[first["prompt"]])["input_ids"] + first["ids"]
        with torch.no_grad(), judge():
            logp = taught(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        wanted = [float(logp[at - 1, ids[at]]) for at in range(len(ids) - len(first["ids"]), len(ids))]
        assert first["teacher"] == pytest.approx(wanted, abs=1e-4)
    before, after = (divergence(taught, name, tokenizer, prompts) for name in (None, "pupil"))
    assert after < 0.95 * before


def test_a_teacher_with_other_tokens_is_refused(
    files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_base("llama"), other)
    tokens = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(InputError, match="its tokens are not those of base_model"):
        packlora.train(tree(tiny_base("llama"), tmp_path / "out", job("pupil", files, "none", teacher=str(other))))


def message(role: str, content: str) -> str:
    """Row with a prompt of one message."""
    return f'{{"prompt": [{{"role": {role}, "content": {content}}}]}}'


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rollout": {"reward": None}}, "neither a reward nor a teacher"),
        ({"rollout": {"teacher_weight": 0.5}}, "teacher_weight is for completions with rollout.teacher"),
        ({"rollout": {"teacher": "nowhere"}}, "rollout.teacher 'nowhere'"),
        ({"train": {"loss_type": "dpo"}}, "rollout is for trainer grpo, and this job's trainer is dpo"),
        ({"train": {"global_batch_size": 6}}, "no whole groups of 4"),
        ({"adapter": {"lora_dropout": 0.1}}, "lora_dropout is 0.1"),
        ({"rollout": {"reward": "x"}}, "names a function in a file"),
        ({"rollout": {"reward": "none.py:f"}}, "there is no file none.py"),
        ({"rollout": {"reward_weights": [1.0, 2.0]}}, "2 numbers for 1 rewards"),
        ({"rollout": {"max_new_tokens": 5000}}, "lower the one or raise the other"),
        ({"rollout": {"max_new_token": 5}}, "max_new_tokens"),
        ({"rollout": {"log_completions": True}}, "is for trackers, and this run has none"),
        ({"rollout": None}, "set rollout"),
        ({"data": {"eval_split": 0.01}}, "of 6 prompts data.eval_split 0.01 is 0, so none is held out"),
        ({"rows": '{"completion": "x"}'}, "line 1: found completion; a row has a prompt"),
        ({"rows": '{"messages": [{"role": "assistant", "content": "x"}]}'}, "has been answered already"),
        ({"rows": '{"prompt": ["x"]}'}, "no text and no messages"),
        ({"rows": ""}, "has no prompts"),
        (
            {"train": {"loss_type": "cispo", "epsilon": 0.2}},
            "epsilon is no bound of loss_type cispo, which has epsilon_high",
        ),
        (
            {"train": {"loss_type": "cispo", "epsilon_high": 0}},
            "epsilon_high is 0, the largest ratio of loss_type cispo",
        ),
        (
            {"train": {"loss_type": "dro", "epsilon_high": 0.2}},
            "epsilon_high is no bound of loss_type dro; leave it out",
        ),
        ({"train": {"loss_type": "importance_sampling", "epsilon": 0}}, "no bound of loss_type importance_sampling"),
        ({"rollout": {"reward_weights": [0.0]}}, "are all 0, so nothing would be learnt"),
        ({"data": {"system": "Be brief."}}, "line 1: its prompt is a text, .* and data.system goes with messages"),
        ({"data": {"chat_template_kwargs": {"mood": "mild"}}}, "data.chat_template_kwargs goes with messages"),
        (
            {"rows": '{"prompt": "x", "system": "Be brief."}'},
            "the row has 'system', .* the first message, or set data.system",
        ),
        (
            {"rows": '{"prompt": "x", "tools": [{"name": "f"}]}'},
            "the row has 'tools', .* set rollout.tools, or rename it",
        ),
        ({"rows": '{"prompt": "x", "images": ["a.png"]}'}, "the row has 'images', .* leave images out"),
        ({"rows": '{"prompt": "\\ud800"}'}, "'prompt' holds half of a surrogate pair"),
        ({"rows": message('"human"', '"x"')}, "message 1 has the role 'human'; chat templates call it user"),
        ({"rows": message("5", '"x"')}, "message 1 must be a mapping with a role and a content"),
        ({"rows": message('"user"', "null")}, "the content of message 1 .user. must be a text, found nothing"),
        ({"rows": message('"user"', '["x"]')}, "a message has a block that is no text"),
        ({"rows": message('"user"', '[{"type": "image"}]')}, "a message has a block that is no text; leave images out"),
    ],
)
def test_what_cannot_be_is_refused_before_training(
    change: dict[str, Any], said: str, files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    asked = job("brief", files)
    if "rows" in change:
        Path(files[1]).write_text(change["rows"] + "\n")
    for section, keys in change.items():
        if section != "rows":
            asked[section] = None if keys is None else asked[section] | keys
    with pytest.raises(InputError, match=said):
        packlora.train(tree(tiny_base("llama"), tmp_path / "out", asked))
    assert not (tmp_path / "out" / "run.json").exists()


def test_a_plan_says_that_completions_are_guessed_and_scales_nothing_up_of_a_short_run(
    files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_plan(run_from(tree(tiny_base("llama"), tmp_path / "out", job("brief", files, max_steps=3))))
    said = capsys.readouterr().out
    assert "job 'brief': its completions are taken to be half of rollout.max_new_tokens long; drawing" in said
    assert "planned: the first" not in said


def test_a_file_of_completions_that_is_damaged_is_drawn_anew(
    files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    """Fields of another type or of other tokens: as a file that is not there."""
    one = job("own", files, max_staleness=1, max_steps=2)
    whole = tree(tiny_base("llama"), tmp_path / "whole", one)
    train(whole, max_steps=1)
    kept = json.loads((tmp_path / "whole" / "own" / "rollouts" / "step-2.json").read_text())
    adapters = []
    for number, damage in enumerate((
        None, {"logprobs": "x"}, {"logprobs": [0.0]}, {"sampled": [1.0]}, {"sampled": ["x"] * 6}, {"entropy": "x"},
        {"reward": None}, {"refilled": {"rounds": "x", "drawn": 2, "missing": 0, "numbers": [0, 1]}},
    )):  # fmt: skip
        out = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", out)
        file, found = out / "own" / "rollouts" / "step-2.json", json.loads(json.dumps(kept))
        if damage is None:
            file.unlink()
        else:
            (found if "refilled" in damage else found["completions"][0]).update(damage)
            file.write_text(json.dumps(found))
        assert train(whole | {"output_dir": str(out)}, resume=True).status == "done"
        adapters.append(adapter(out, "own"))
    assert all(distance(own, adapters[0]) == 0 for own in adapters)
