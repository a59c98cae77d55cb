"""Completions of several turns: environments and tools, by the run file."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import WORDS
from hanging import given_up_where_it_hangs
from peft import PeftModel
from test_policy_trl import of_trl
from test_training import adapter, distance, steps, train

import packlora
from packlora.data.template import Template
from packlora.engine.objective import RowsView
from packlora.engine.rows import Row
from packlora.errors import InputError
from packlora.rl.config import RolloutConfig
from packlora.rl.conversation import rendered_between
from packlora.rl.data import sample_of
from packlora.rl.environments import Environments
from packlora.rl.judging import reward_hash
from packlora.rl.objective import RewardObjective
from packlora.rl.tools import Call, calls_of, message_of, run_calls

ENVIRONMENTS = '''
import math
from hanging import hang

class Guess:
    """Says after each turn how many letters o it had; the third one ends the game."""

    def reset(self, word, seed):
        self.word, self.left, self.said = word, 3, []
        return None if seed % 2 else " " + word

    def step(self, completion):
        self.left -= 1
        self.said.append(completion)
        return f"found {completion.count('o')}", float(completion.count("e")) - 0.1 * len(completion), self.left == 0

class Counter:
    """An environment of TRL's form: its methods are tools."""

    def reset(self, **row):
        self.total = 0
        return [{"role": "user", "content": "count"}]

    def add(self, number: int) -> int:
        """Add a number.

        Args:
            number: What is added.
        """
        self.total += number
        return self.total

    async def get_reward(self):
        return float(self.total)

class Poison(Guess):
    how = "raise"

    def step(self, completion):
        if self.word == "quick":
            if self.how == "raise":
                raise RuntimeError("no")
            if self.how == "hang":
                hang()
            if self.how == "nan":
                return "so", math.nan, False
            if self.how == "three":
                return "so", 1.0
            if self.how == "exit":
                exit(3)
            if self.how == "maybe":
                return "so", 1.0, Maybe()
        return super().step(completion)

class Hang(Poison):
    how = "hang"

class Nan(Poison):
    how = "nan"

class Pair(Poison):
    how = "three"

class Exit(Poison):
    how = "exit"

class Doubt(Poison):
    how = "maybe"

class Maybe:
    def __bool__(self):
        raise ValueError("who knows")

class Gone:
    def __init__(self):
        exit(3)

class NoReset(Guess):
    def reset(self, word):
        if word == "quick":
            raise KeyError("level")
        super().reset(word, 1)

class Long(Guess):
    def reset(self, word):
        super().reset(word, 1)
        return [{"role": "user", "content": "the " * 300}] if word == "quick" else None

class Needs(Guess):
    def reset(self, level, seed):
        super().reset(level, seed)

class Alone:
    pass

class Silent:
    def reset(self):
        pass

def halve(number: float) -> float:
    """Halve a number.

    Args:
        number: What is halved.
    """
    return number / 2

def untold(number):
    return number

def bare(completions):
    return [0.0 for _ in completions]

def looks(prompts, completions, environments, **columns):
    return [float(len(own.said)) + len(said) for own, said in zip(environments, completions)]
'''
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Folder of environments, prompts and a chat template."""
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    (tmp_path / "tools.jinja").write_text(TOOLS)
    lines = [
        {"prompt": [{"role": "user", "content": " ".join(WORDS[n : n + 3])}], "word": WORDS[n % 4]} for n in range(4)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.fixture(scope="module")
def base(tiny_base: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model, a fifth of whose tokens end a turn."""
    return ending(tiny_base("llama"), tmp_path_factory.mktemp("ends") / "base", 5)


def ending(base: str, folder: Path, every: int) -> str:
    """A copy of a model that ends a turn by every so many-th token, too."""
    shutil.copytree(base, folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["eos_token_id"] = [2, 5, *range(6, 320, every)]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return str(folder)


def job(name: str, files: Path, environment: str | None = "Guess", **keys: Any) -> dict[str, Any]:
    rollout = {"num_generations": 4, "max_new_tokens": 72, "max_turns": 3}
    if environment is not None:
        rollout["environment_factory"] = f"{files}/envs.py:{environment}"
    data, seed = {"path": str(files / "prompts.jsonl")} | keys.pop("data", {}), keys.pop("seed", 1)
    rollout |= {key: keys.pop(key) for key in RolloutConfig.model_fields if key in keys}
    own = {"loss_type": "dapo", "global_batch_size": 8, "learning_rate": 1e-2, "max_steps": 3} | keys
    return {
        "name": name, "data": data, "adapter": {"r": 4, "target_modules": ["q_proj", "down_proj"]}, "seed": seed,
        "rollout": rollout, "train": own,
    }  # fmt: skip


def tree(base: str, out: Path, *jobs: dict[str, Any], **more: Any) -> dict[str, Any]:
    common = {"base_model": base, "output_dir": str(out), "device": "cpu", "dtype": "float32", "save_every": 1}
    return common | {"max_tokens_per_microbatch": 256, "jobs": list(jobs)} | more


def drawn(out: Path, name: str, step: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / name / "rollouts" / f"step-{step}.json").read_text())["completions"]
    return found


def of_step(out: Path, name: str, step: int) -> dict[str, Any]:
    return next(line for line in steps(out) if line.get("job") == name and line["step"] == step)


def heard(one: dict[str, Any]) -> list[list[int]]:
    """Tokens of the environment, by what it said."""
    out: list[list[int]] = []
    for at, (token, own) in enumerate(zip(one["ids"], one["mask"], strict=True)):
        if own == 0:
            out = [*out, []] if one["mask"][at - 1] else out
            out[-1].append(token)
    return out


def test_turns_are_drawn_after_all_that_was_said_and_the_same_bits_together_alone_and_resumed(
    files: Path, base: str, tmp_path: Path
) -> None:
    """Log-probabilities of whole conversations are those of transformers and PEFT; what the environment said has none."""
    game, beside = job("game", files), job("plain", files, reward=f"{files}/envs.py:looks", seed=2, max_staleness=1)
    assert train(tree(base, tmp_path / "both", game, beside)).status == "done"
    train(tree(base, tmp_path / "alone", game))
    assert distance(adapter(tmp_path / "both", "game"), adapter(tmp_path / "alone", "game")) == 0
    parts = tree(base, tmp_path / "parts", game, beside)
    train(parts, max_steps=1)
    saved = tmp_path / "first"
    shutil.copytree(tmp_path / "parts" / "game", saved)
    train(parts, resume=True)
    for name in ("game", "plain"):
        assert distance(adapter(tmp_path / "parts", name), adapter(tmp_path / "both", name)) == 0

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    learnt = PeftModel.from_pretrained(model, str(saved)).eval()
    rows = [json.loads(line)["prompt"] for line in (files / "prompts.jsonl").read_text().splitlines()]
    for step in (1, 2):
        for one in drawn(tmp_path / "parts", "game", step):
            start = one["start"] or tokenizer.apply_chat_template(
                rows[one["prompt"]], add_generation_prompt=True, return_dict=False
            )
            ids = torch.tensor([start + one["ids"]])
            with torch.no_grad():
                logits = model(ids).logits if step == 2 else learnt_without(learnt, ids)
            logp = logits[0].double().log_softmax(-1)
            places = [len(start) + at for at, own in enumerate(one["mask"]) if own]
            wanted = [float(logp[at - 1, ids[0, at]]) for at in places]
            assert one["logprobs"] == pytest.approx(wanted, abs=1e-4)
            assert len(one["ids"]) <= 72 and one["turns"] <= 3 and len(heard(one)) in (one["turns"] - 1, one["turns"])
            for said in heard(one):
                text = tokenizer.decode(said)
                assert text.startswith("\n<|im_start|>user\nfound ")
                assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    both = [one for step in (1, 2, 3) for one in drawn(tmp_path / "both", "game", step)]
    assert {one["turns"] for one in both} >= {2, 3} and any(one["start"] for one in both)
    for step in (1, 2, 3):  # what is trained on is what was drawn
        assert abs(of_step(tmp_path / "both", "game", step)["sampling/kl"]) < 1e-5
    line = of_step(tmp_path / "both", "plain", 3)
    assert line["rewards/looks/mean"] + line["rewards/Guess/mean"] == pytest.approx(line["reward"])
    assert line["rollout/turns"] > 1 and line["sampling/sampling_logp_difference/mean"] < 1e-4
    own = drawn(tmp_path / "both", "plain", 3)
    assert line["completions/mean_length"] == pytest.approx(np.mean([sum(one["mask"]) for one in own]))


def learnt_without(learnt: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the base model."""
    with learnt.disable_adapter():
        logits: torch.Tensor = learnt(ids).logits
    return logits


def loop_of_trl(tokenizer: Any, made: list[Call], start: list[int], turns: list[list[int]]) -> dict[str, Any]:
    """What TRL's GRPOTrainer makes of a prompt and turns that are given, each with these calls, by its own loop over tools."""
    (first, *later), total = turns, [0]

    def add(number: int) -> int:
        total[0] += number
        return total[0]

    def parsed(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "tool_calls": [call.message for call in made]}

    own: Any = SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False, chat_template=None, chat_template_kwargs={},
        max_tool_calling_iterations=2, _sync_tool_dicts=[{"add": add, "halve": lambda number: number / 2}], tools=[add],
        _async_tool_dicts=[{}], use_vllm=False, max_completion_length=500, environment_factories=None,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=2048)),
        _generate_single_turn=lambda *args, **kwargs: ([later.pop(0)], None),
    )  # fmt: skip
    suffix = of_grpo_trainer("_get_tool_suffix_ids")
    own._get_tool_suffix_ids = lambda messages: suffix(own, messages)
    loop = of_grpo_trainer("_tool_call_loop", parse_response=parsed)
    mask, messages, ids, _, calls, failures, _ = loop(own, [[{}]], [start], [first], [[parsed()]], None, None, {})
    return {"mask": mask[0], "ids": ids[0], "calls": calls, "failures": failures, "messages": messages[0]}


def turns_of(one: dict[str, Any]) -> list[list[int]]:
    """Tokens of the model, by turn."""
    out: list[list[int]] = [[]]
    for at, (token, own) in enumerate(zip(one["ids"], one["mask"], strict=True)):
        if own:
            out = [*out, []] if at and not one["mask"][at - 1] else out
            out[-1].append(token)
    return out


def test_calls_of_tools_are_run_and_conversations_are_those_of_trl(
    files: Path, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny model makes no calls, so each of its turns is read as three."""
    from packlora.rl import drawing

    made = [Call("add", {"number": 2}), Call("halve", {"number": 5}), Call("nothing", {})]
    monkeypatch.setattr(drawing, "calls_of", lambda text: made)
    keys = {"tools": f"{files}/envs.py:halve", "data": {"chat_template": str(files / "tools.jinja")}}
    asked = job("counts", files, "Counter", **keys, max_steps=1, max_new_tokens=500)
    asked["data"] |= {"max_length": 1500}
    shutil.copytree(base, tmp_path / "long")
    config = json.loads((tmp_path / "long" / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (tmp_path / "long" / "config.json").write_text(json.dumps(config))
    run = tree(str(tmp_path / "long"), tmp_path / "out", asked, max_tokens_per_microbatch=2000)
    assert train(run).status == "done"
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    told = transformers.AutoTokenizer.from_pretrained(base, eos_token="<|im_end|>", chat_template=TOOLS)
    found = drawn(tmp_path / "out", "counts", 1)
    for one in found:
        assert one["turns"] == 3 and one["reward"] == 4.0 and (one["calls"], one["failures"]) == (6, 2)
        results = [f"<|im_start|>tool\n{own}<|im_end|>\n" for own in (2, 2.5)]
        wanted = "\n" + "".join(results) + "<|im_start|>tool\n{'error': 'Tool nothing not found.'}<|im_end|>\n"
        assert tokenizer.decode(heard(one)[0]).startswith(wanted)
        trl = loop_of_trl(told, made, one["start"], turns_of(one))
        assert {key: trl[key] for key in ("mask", "ids", "calls", "failures")} == {
            key: one[key] for key in ("mask", "ids", "calls", "failures")
        }
        shown = tokenizer.decode(one["start"])
        assert '"name": "add"' in shown and '"name": "halve"' in shown and "<|im_start|>user\ncount<|im_end|>" in shown
    line = of_step(tmp_path / "out", "counts", 1)
    assert line["tools/failure_frequency"] == pytest.approx(1 / 3) and line["tools/call_frequency"] == 6


RAISES = ENVIRONMENTS[: ENVIRONMENTS.index('raise RuntimeError("no")')].count("\n") + 1
POISONS = {
    "Poison": f"envs.py, line {RAISES}, failed: RuntimeError: no; its completions teach nothing",
    "Hang": "an environment or tool took more than 0.3 seconds",
    "Nan": "step gave the reward nan; a reward is a finite number",
    "Pair": "step gave a tuple; it gives an observation, a reward, and whether it is done",
    "Exit": "failed: SystemExit: 3; its completions teach nothing",
    "Doubt": "ValueError: who knows; its completions teach nothing",
    "NoReset": "failed: KeyError: 'level'",
    "Long": "leave room for max_new_tokens",
}


def test_an_environment_that_fails_costs_its_group_alone(
    files: Path, base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy = job("game", files, max_steps=1, seed=5)
    train(tree(base, tmp_path / "alone", healthy))
    keys = {"max_steps": 1, "global_batch_size": 16, "reward_timeout": 0.3}
    poisoned = [job(name.lower(), files, name, **keys) for name in POISONS]
    capsys.readouterr()
    with given_up_where_it_hangs():
        result = train(tree(base, tmp_path / "out", healthy, *poisoned))
    told = capsys.readouterr().out
    assert result.status == "done"
    assert distance(adapter(tmp_path / "out", "game"), adapter(tmp_path / "alone", "game")) == 0
    for name, said in POISONS.items():
        (note,) = [line for line in told.splitlines() if said in line]
        assert f"job '{name.lower()}', step 1: " in note and "prompts.jsonl, line 2" in note
        lost = {one["prompt"]: one["is_lost"] for one in drawn(tmp_path / "out", name.lower(), 1)}
        assert lost == {0: False, 1: True, 2: False, 3: False}


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "cispo", "gspo"])
def test_masked_losses_and_gradients_are_those_of_trl(loss_type: str) -> None:
    """Tokens of the environment have a tool_mask of 0 in TRL; here they are no labels."""
    draw = np.random.default_rng(2)
    lengths, wide = (5, 9, 4, 7), 9
    logp = -1 - 2 * draw.random((4, wide))
    sampled, gains = logp + 0.4 * draw.standard_normal((4, wide)), draw.standard_normal(4)
    there = np.arange(wide) < np.array(lengths)[:, None]
    own = draw.random((4, wide)) < 0.6
    own[:, 0] = True
    learnt = there & own
    leaf = torch.from_numpy(logp).requires_grad_()
    kind, level = ("grpo", "sequence") if loss_type == "gspo" else (loss_type, "token")
    given = {
        "completion_mask": torch.from_numpy(there).double(), "tool_mask": torch.from_numpy(own).double(),
        "advantages": torch.from_numpy(gains), "old_per_token_logps": torch.from_numpy(sampled),
        "importance_sampling_ratio": torch.ones(4, wide, dtype=torch.float64), "num_items_in_batch": torch.tensor(learnt.sum()),
    }  # fmt: skip
    wanted, _ = of_trl(kind, level, 0.0, leaf, given)
    (gradient,) = torch.autograd.grad(wanted, leaf)

    high = 1.3 if loss_type == "cispo" else 0.28
    train_keys = packlora.config.TrainConfig(trainer="grpo", loss_type=loss_type, epsilon=0.2, epsilon_high=high)
    objective = RewardObjective.of(train_keys, RolloutConfig(reward="a.py:b", max_new_tokens=12))
    if loss_type == "gspo":
        objective.over = "samples"
    rows = [
        Row(sample_of([1, 2], [3] * length, own[n, :length].astype(int).tolist(), {
            "logprobs": sampled[n][learnt[n]], "advantages": np.array(gains[n]),
        }))
        for n, length in enumerate(lengths)
    ]  # fmt: skip
    facts = {"units": float(learnt.sum()), "samples": 4.0}
    logp_L = torch.from_numpy(logp[learnt]).requires_grad_()
    loss = objective.loss(logp_L, RowsView.of(objective, rows, facts))[0].sum() / facts["units"]
    (gradient_L,) = torch.autograd.grad(loss, logp_L)
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=0)
    torch.testing.assert_close(gradient_L, gradient[torch.from_numpy(learnt)], rtol=1e-10, atol=1e-15)
    assert float(gradient[torch.from_numpy(~learnt)].abs().sum()) == 0


def of_grpo_trainer(name: str, **known: Any) -> Callable[..., Any]:
    """A method of TRL's GRPOTrainer, compiled by itself, with what it knows of its module."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL is not installed")
    parsed = ast.parse((Path(spec.origin).parent / "trainer" / "grpo_trainer.py").read_text())
    (method,) = [node for node in ast.walk(parsed) if isinstance(node, ast.FunctionDef) and node.name == name]
    exec(compile(ast.Module([method], []), "grpo_trainer.py", "exec"), known)
    found: Callable[..., Any] = known[name]
    return found


def suffix_of_trl(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """What TRL's GRPOTrainer puts between a turn with calls and the next one."""
    own = SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False, chat_template=None, chat_template_kwargs={}
    )
    found: list[int] = of_grpo_trainer("_get_tool_suffix_ids")(own, messages)
    return found


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_training", "smollm3", "llama3", "gemma3", "phi3"])
def test_what_stands_between_turns_is_what_the_chat_template_writes_there(name: str, tokenizer: Any) -> None:
    """For calls, the tokens are TRL's; for a user's message, the whole conversation is what transformers renders."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL is not installed")
    file = Path(spec.origin).parent / "chat_templates" / f"{name}.jinja"
    if not file.is_file():
        pytest.skip("this TRL has no such template")
    end = {"llama3": "<|eot_id|>", "gemma3": "<end_of_turn>", "phi3": "<|end|>"}.get(name, "<|im_end|>")
    own = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=end, bos_token="<s>", chat_template=file.read_text()
    )
    template = Template(own)
    asked: list[dict[str, Any]] = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    following = [{"role": "user", "content": "three"}]
    text = template.render(asked)
    begun = text[: text.index(end, text.index("two")) + len(end)]
    wanted = own.apply_chat_template([*asked, *following], tokenize=False, add_generation_prompt=True)
    found = rendered_between(following, False, template, end)
    assert "three" in found and wanted.endswith(found)
    if "<think>" not in wanted:
        assert begun + found == wanted
    if name in ("qwen2_5", "qwen3_training"):
        results = [{"role": "tool", "name": "f", "content": "4"}, {"role": "tool", "name": "g", "content": "5"}]
        ids = own(rendered_between(results, True, template, end), add_special_tokens=False)["input_ids"]
        assert ids == suffix_of_trl(own, results)


def test_calls_are_read_from_what_a_model_writes() -> None:
    text = 'so <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><tool_call>{"name": 3}</tool_call>'
    first, second = calls_of(text + "<tool_call>[1")
    assert first == Call("add", {"a": 1}) and second.arguments is None
    message = message_of(text, [first, second])
    assert message["content"] == "so" and [own["function"]["name"] for own in message["tool_calls"]] == ["add"]

    async def add(a: int) -> int:
        return a + 1

    messages, failures = run_calls([first, second, Call("add", {"b": 1})], {"add": add})
    assert messages[0] == {"role": "tool", "name": "add", "content": "2"} and failures == 2
    assert messages[1]["name"] == "unknown" and "unexpected keyword" in messages[2]["content"]


def test_an_environment_of_a_program_plays_prompts_that_are_texts(base: str, tmp_path: Path) -> None:
    class Echo:
        def reset(self, prompt: str) -> str:
            return prompt + "?"

        def step(self, completion: str) -> tuple[str, float, bool]:
            return " the fox", 1.0, False

    keys = {"environment_factory": Echo, "max_turns": 2, "num_generations": 2, "max_new_tokens": 40}
    own = packlora.Job(
        "echo", data=[{"prompt": "the"}], rollout=keys, loss_type="grpo", global_batch_size=2, max_steps=1
    )
    assert packlora.Trainer(base, jobs=[own], output_dir=str(tmp_path / "out"), device="cpu").train().status == "done"
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    for one in drawn(tmp_path / "out", "echo", 1):
        assert one["turns"] == 2 and one["reward"] == 2.0 and tokenizer.decode(one["start"]).endswith("thethe?")
        assert [tokenizer.decode(said) for said in heard(one)] == [" the fox"]


@pytest.mark.parametrize(
    ("environment", "keys", "said"),
    [
        ("Alone", {}, "gives a Alone without `reset`"),
        ("Silent", {}, "the environment has neither `step` nor `get_reward`; set rollout.reward"),
        ("Missing", {}, "has no 'Missing'; it has Guess"),
        ("Gone", {}, "rollout.environment_factory .*envs.py:Gone: .*failed: SystemExit: 3"),
        ("looks", {}, "rollout.environment_factory .*envs.py:looks: .*failed: TypeError"),
        (
            "Needs",
            {},
            "`reset` cannot be called: missing a required argument: 'level'; it is given .* the fields of rows: word",
        ),
        ("Guess", {"reward": "{}:bare"}, "envs.py:bare cannot be called: got an unexpected keyword argument 'prompts'"),
        ("Counter", {}, "writes no tool calls, or in a form that is not read"),
        ("Guess", {"tools": "{}:untold"}, "tool 'untold'.*type hints"),
        ("Guess", {"tools": ["{}:halve", "{}:halve"]}, "has 'halve' twice"),
        ("Guess", {"tools": "halve"}, "names a function in a file"),
        ("Guess", {"tools": []}, "is a list of 0 functions"),
        (None, {"max_turns": 4, "reward": "{}:looks"}, "rollout.max_turns is for completions with"),
        (None, {"tools": "{}:halve"}, "neither a reward nor a teacher"),
    ],
)
def test_environments_that_cannot_be_are_refused_before_training(
    environment: str | None, keys: dict[str, Any], said: str, files: Path, base: str, tmp_path: Path
) -> None:
    file = str(files / "envs.py")
    filled = {
        key: [one.format(file) for one in value]
        if isinstance(value, list)
        else value.format(file)
        if isinstance(value, str)
        else value
        for key, value in keys.items()
    }
    with pytest.raises(InputError, match=said):
        packlora.train(tree(base, tmp_path / "out", job("game", files, environment, **filled)))
    assert not (tmp_path / "out" / "run.json").exists()


def test_a_resumed_run_sees_that_an_environment_or_a_tool_has_changed(files: Path) -> None:
    keys = {"environment_factory": f"{files}/envs.py:Guess"}, {"reward": "a.py:b", "tools": [f"{files}/envs.py:halve"]}
    configs = [RolloutConfig(**own) for own in keys]  # type: ignore[arg-type]
    before = [reward_hash(config) for config in configs]
    shutil.copytree(files, files / "elsewhere")
    moved = configs[0].model_copy(update={"environment_factory": f"{files}/elsewhere/envs.py:Guess"})
    assert reward_hash(moved) == before[0]
    (files / "envs.py").write_text(ENVIRONMENTS + "# a comment\n")
    assert all(reward_hash(config) != own for config, own in zip(configs, before, strict=True))


def test_paths_are_looked_up_beside_the_run_file_and_tools_are_in_a_preview(
    files: Path, base: str, tmp_path: Path
) -> None:
    own = job("counts", files, None, data={"chat_template": "tools.jinja", "path": "prompts.jsonl", "max_length": 1500})
    own["rollout"] |= {"environment_factory": "envs.py:Counter", "tools": ["envs.py:halve"], "max_new_tokens": 20}
    shutil.copytree(base, tmp_path / "long")
    config = json.loads((tmp_path / "long" / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (tmp_path / "long" / "config.json").write_text(json.dumps(config))
    (files / "run.yaml").write_text(json.dumps(tree(str(tmp_path / "long"), tmp_path / "out", own)))
    (shown, *_) = packlora.preview(files / "run.yaml")
    text = "".join(piece.text for piece in shown.pieces)
    assert '"name": "add"' in text and '"name": "halve"' in text


def test_tools_are_for_prompts_that_are_messages(files: Path) -> None:
    environments = Environments(RolloutConfig(tools=f"{files}/envs.py:halve", reward="a.py:b"), "a job")
    assert environments.schemas is not None and environments.schemas[0]["function"]["name"] == "halve"
    from packlora.rl.prompts import tokens_of

    with pytest.raises(InputError, match="make it a list of messages"):
        tokens_of("a text", None, {}, environments.schemas)


def test_a_turn_after_an_environment_that_says_nothing_is_heard_alone(base: str, tmp_path: Path) -> None:
    seen = list[list[str]]()

    class Quiet:
        def reset(self, prompt: str) -> None:
            self.seen = list[str]()
            seen.append(self.seen)

        def step(self, completion: str) -> tuple[str, float, bool]:
            self.seen.append(completion)
            return "", 1.0, False

    keys = {"environment_factory": Quiet, "max_turns": 2, "num_generations": 2, "max_new_tokens": 40}
    own = packlora.Job(
        "quiet", data=[{"prompt": "the"}], rollout=keys, loss_type="grpo", global_batch_size=2, max_steps=1
    )
    assert packlora.Trainer(base, jobs=[own], output_dir=str(tmp_path / "out"), device="cpu").train().status == "done"
    tokenizer, found = transformers.AutoTokenizer.from_pretrained(base), drawn(tmp_path / "out", "quiet", 1)
    assert [one["turns"] for one in found] == [2, 2]
    whole = sorted(tokenizer.decode(one["ids"], skip_special_tokens=True) for one in found)
    assert sorted("".join(turns) for turns in seen) == whole
