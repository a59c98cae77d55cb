"""Vision-language models: rows with images, packed beside texts and other jobs' rows, train as they do alone and as in PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from vision_models import image_row, vision_folder, write_images

import packlora
from packlora.base.load import read_config
from packlora.base.model import load_base
from packlora.commands.held_out import evaluate_adapter
from packlora.config import Run
from packlora.errors import InputError
from packlora.images import proof
from packlora.images.plugin import modality
from packlora.images.vision import Vision
from packlora.runtime.prepare import prepare

CONVOLUTION = r".*(_proj|proj|patch_embedding|fc\d|qkv|linear_\d|linear_fc\d)"
"""Linear layers of both parts, and the convolution that patches are embedded by."""
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"use_dora": False}, "dora": {"use_dora": True, "target_modules": CONVOLUTION, "bias": "lora_only"},
}  # fmt: skip
SIZES = [(24, 16), (16, 16), (32, 24), (20, 40), (40, 20)]
"""Widths and heights: odd numbers of patches, and both ways round."""


@pytest.fixture(scope="session")
def vision_base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def make(family: str) -> str:
        if family not in made:
            made[family] = vision_folder(family, tokenizer, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By job its data: rows with one image, with two, and without."""
    out = {}
    for seed, name in enumerate(KINDS):
        folder = tmp_path_factory.mktemp(name)
        names = write_images(folder, SIZES, seed)
        some = [
            image_row(names[:1], "what is it", "the quick brown fox"),
            image_row([], "and now", "jumps over the dog"),
            image_row(names[1:3], "both of them", "lazy"),
            image_row(names[3:4], "this", "and then some more of the same"),
            image_row(names[4:5], "the last one", "fox"),
        ]
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in some))
        out[name] = str(path)
    return out


def plain_model(base: str) -> Any:
    return AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float64, attn_implementation="sdpa")


def peft_model(base: str, kind: dict[str, Any]) -> Any:
    """PEFT's model of random adapters on everything that all-linear means, in float64."""
    torch.manual_seed(0)
    loaded = plain_model(base)
    torch.set_default_dtype(torch.float64)
    try:
        peft = get_peft_model(loaded, LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": "all-linear"} | kind))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
                assert parameter.dtype == torch.float64, name
    return peft.eval()


def own_inputs(base: str, data: str) -> list[dict[str, torch.Tensor]]:
    """Of each row what the library's own processor gives, with the labels of what the assistant says."""
    conversations = [json.loads(line)["messages"] for line in Path(data).read_text().splitlines()]
    return inputs_of(base, conversations, Path(data).parent)


def inputs_of(base: str, conversations: list[Any], folder: Path) -> list[dict[str, torch.Tensor]]:
    vision = Vision.of(base, None, read_config(base, None))
    tokenizer = vision.processor.tokenizer
    out = []
    for messages in conversations:
        answer = messages[1]["content"] + "<|im_end|>"
        blocks = [message | {"content": message["content"] if isinstance(message["content"], list) else [
            {"type": "text", "text": message["content"]}]} for message in messages]  # fmt: skip
        text = tokenizer.apply_chat_template(blocks, tokenize=False).rstrip("\n")
        images = [Image.open(folder / block["path"]) for block in blocks[0]["content"] if block["type"] == "image"]
        inputs = vision.processor(images=images or None, text=[text], return_tensors="pt", add_special_tokens=False)
        labels = inputs["input_ids"].clone()
        labels[:, : -len(tokenizer(answer)["input_ids"])] = -100
        out.append(dict(inputs) | {"labels": labels})
    return out


def tree(base: str, out: Path, rows: dict[str, str], starts: Path | None, **changes: Any) -> dict[str, Any]:
    train = {"global_batch_size": 3, "max_steps": 3, "learning_rate": 5e-3, "max_grad_norm": 0.5}
    jobs = [
        {
            "name": name,
            "data": {"path": rows[name], "eval_path": rows[name]},
            "train": train,
            "adapter": {"r": 3, "lora_alpha": 5, **kind, "lora_dropout": 0.25}
            if starts is None
            else {"init_from": str(starts / name), "lora_dropout": 0.0},
        }
        for name, kind in KINDS.items()
    ]
    return {
        "base_model": base, "output_dir": str(out), "max_tokens_per_microbatch": 400, "save_every": 1, "device": "cpu",
        "dtype": "float64", "jobs": jobs,
    } | changes  # fmt: skip


def adamw(model: Any) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.0)


def stepped(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """The loss, after a step of a gradient that is clipped as the jobs' are."""
    loss.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "family",
    [
        "qwen3_vl",
        "gemma3",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("qwen2_5_vl", "llava", "llava_next")),
    ],
)
def test_steps_on_images_are_those_of_peft_and_adamw(
    family: str, vision_base: Any, rows: dict[str, str], tmp_path: Path
) -> None:
    """Two jobs in one microbatch, on all linear layers of the vision tower and the language model."""
    base = vision_base(family)
    models = {name: peft_model(base, kind) for name, kind in KINDS.items()}
    for name, peft in models.items():
        peft.save_pretrained(tmp_path / name)
    asked = tree(base, tmp_path / "out", rows, tmp_path, save_every=100)
    for job in asked["jobs"]:
        job["train"] = job["train"] | {"max_steps": 2}
    run = Run.model_validate(asked)
    order = {job.config.name: job.data for job in prepare(run).jobs}
    result = packlora.train(run)
    assert result.status == "done"
    for name, peft in models.items():
        inputs = own_inputs(base, rows[name])
        optimizer = adamw(peft)
        held_out = evaluated(peft, inputs)
        losses = []
        for step in range(2):
            batch = [inputs[number] for number in order[name].global_batch(step)]
            count = sum(int((one["labels"][:, 1:] != -100).sum()) for one in batch)
            loss = sum(summed(peft, one) for one in batch) / count
            losses.append(stepped(optimizer, loss))
        lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
        mine = [line["loss"] for line in lines if line.get("job") == name and "loss" in line]
        assert mine == pytest.approx(losses, abs=1e-10)
        theirs, got = (
            get_peft_model_state_dict(peft),
            load_file(tmp_path / "out" / name / "adapter_model.safetensors"),
        )
        assert len(theirs) == len(got)
        for key, value in theirs.items():
            own = got[key] if key in got else got[key + ".weight"]
            assert float((own - value).abs().max()) < 1e-10, key
        assert any("language_model" not in key and "_B" in key for key in got)
        assert (name == "dora") == any("patch_embed" in key and "_B" in key for key in got)
        done = result.jobs[name]
        assert (done.eval_before, done.eval_after) == pytest.approx((held_out, evaluated(peft, inputs)), abs=1e-10)
        read = PeftModel.from_pretrained(plain_model(base), str(tmp_path / "out" / name)).eval()
        with torch.no_grad():
            assert torch.allclose(logits(read, inputs[2]), logits(peft, inputs[2]), rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.soak)])
def test_pairs_with_images_are_learnt_as_dpo_has_it(
    family: str, vision_base: Any, rows: dict[str, str], tmp_path: Path
) -> None:
    """Beside a job of completions with images. The reference is the adapter that the job begins with, as PEFT has it."""
    base, folder = vision_base(family), Path(rows["lora"]).parent
    peft = peft_model(base, KINDS["lora"])
    peft.save_pretrained(tmp_path / "lora")
    given: list[tuple[list[str], str, str, str]] = [
        (["0-1.png"], "what is it", "the quick brown fox", "dog"), ([], "and now", "jumps over", "lazy dog"),
        (["0-2.png", "0-3.png"], "both of them", "lazy", "the fox and more of it"),
    ]  # fmt: skip
    texts = [{"images": names, "prompt": q, "chosen": good, "rejected": bad} for names, q, good, bad in given[::2]]
    turns = [{"role": "assistant", "content": text} for text in given[1][2:]]
    plain = {"prompt": [{"role": "user", "content": given[1][1]}], "chosen": turns[:1], "rejected": turns[1:]}
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (texts[0], plain, texts[1])))
    train = {
        "global_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 5e-3,
        "max_grad_norm": 0.5,
        "trainer": "dpo",
        "beta": 0.3,
    }
    data = {"path": str(folder / "pairs.jsonl"), "eval_path": str(folder / "pairs.jsonl")}
    adapter = {"init_from": str(tmp_path / "lora"), "lora_dropout": 0.0}
    beside = tree(base, tmp_path / "out", rows, None)["jobs"][1]
    jobs = [{"name": "pairs", "data": data, "train": train, "adapter": adapter}, beside]
    run = Run.model_validate(tree(base, tmp_path / "out", rows, None, jobs=jobs))
    prepared = prepare(run).jobs[0]
    result = packlora.train(run)

    pairs = [
        inputs_of(base, [image_row(names, question, text)["messages"] for text in texts], folder)
        for names, question, *texts in given
    ]

    def margins(batch: list[int]) -> torch.Tensor:
        return torch.stack([summed(peft, pairs[n][1]) - summed(peft, pairs[n][0]) for n in batch])

    with torch.no_grad():
        reference = margins([0, 1, 2])
    optimizer = adamw(peft)
    losses = []
    for step in range(3):
        batch = list(prepared.data.global_batch(step))
        loss = -torch.nn.functional.logsigmoid(0.3 * (margins(batch) - reference[batch])).mean()
        losses.append(stepped(optimizer, loss))
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line.get("job") == "pairs"]
    assert [line["loss"] for line in found if "loss" in line] == pytest.approx(losses, abs=1e-10)
    assert losses[0] == pytest.approx(np.log(2)) and abs(losses[2] - losses[0]) > 1e-3
    with torch.no_grad():
        held_out = -torch.nn.functional.logsigmoid(0.3 * (margins([0, 1, 2]) - reference)).mean()
    assert result.jobs["pairs"].eval_after == pytest.approx(float(held_out), abs=1e-10)
    got = load_file(tmp_path / "out" / "pairs" / "adapter_model.safetensors")
    for key, value in get_peft_model_state_dict(peft).items():
        assert float((got[key] - value).abs().max()) < 1e-10, key


def summed(peft: Any, one: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the losses of a row's label tokens."""
    return torch.nn.functional.cross_entropy(logits(peft, one)[:-1], one["labels"][0, 1:], reduction="sum")


def logits(peft: Any, one: dict[str, torch.Tensor]) -> torch.Tensor:
    own = {name: tensor for name, tensor in one.items() if name not in ("labels", "attention_mask")}
    own = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in own.items()}
    found: torch.Tensor = peft(**own, use_cache=False).logits[0]
    return found


def evaluated(peft: Any, inputs: list[dict[str, torch.Tensor]]) -> float:
    with torch.no_grad():
        count = sum(int((one["labels"][:, 1:] != -100).sum()) for one in inputs)
        return float(sum(summed(peft, one) for one in inputs)) / count


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.soak)])
def test_a_job_alone_gives_what_it_gave_beside_another_and_resumed(
    family: str, vision_base: Any, rows: dict[str, str], tmp_path: Path
) -> None:
    """With dropout, in the vision tower as well, and microbatches of other samples; DoRA, on the convolution too."""
    asked = tree(vision_base(family), tmp_path / "both", rows, None)
    packlora.train(Run.model_validate(asked), max_steps=2)
    packlora.train(Run.model_validate(asked), resume=True)
    small = asked | {"max_tokens_per_microbatch": 120, "gradient_checkpointing": True}
    packlora.train(Run.model_validate(small | {"output_dir": str(tmp_path / "alone"), "jobs": asked["jobs"][1:]}))
    mine, other = (load_file(tmp_path / run / "dora" / "adapter_model.safetensors") for run in ("both", "alone"))
    assert mine.keys() == other.keys()
    assert all(float((mine[key] - other[key]).abs().max()) < 1e-10 for key in mine)
    for place in ("visual.blocks", "patch_embed") if family == "qwen2_5_vl" else ("encoder", "patch_embedding"):
        assert any(float(mine[key].abs().max()) > 0 for key in mine if "lora_B" in key and place in key), place


BROKEN: dict[str, tuple[str, str, Any]] = {
    "positions": ("qwen2_5_vl", "positions", lambda self, ids, images: np.arange(len(ids))),
    "places of interleaved positions": ("qwen3_vl", "positions", lambda self, ids, images: np.arange(len(ids))),
    "images that see themselves": ("gemma3", "blocks", lambda self, ids, start: np.full(len(ids), -1)),
    "images that see one another": ("gemma3", "blocks", lambda self, ids, start: np.where(ids == self.token_id, 0, -1)),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_model_that_is_packed_wrongly_is_refused(
    fault: str, vision_base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, method, wrong = BROKEN[fault]
    base = vision_base(family)
    run = Run.model_validate(tree(base, Path("out"), dict.fromkeys(KINDS, "-"), None, dtype="float32"))
    vision = modality(base, None, read_config(base, None))
    monkeypatch.setattr(Vision, method, wrong)
    with pytest.raises(InputError, match="its own logits of samples with images differ by"):
        load_base(run, None, {}, vision)


def test_rows_of_images_that_do_not_lie_together_are_noticed(vision_base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base = vision_base("qwen2_5_vl")
    run = Run.model_validate(tree(base, Path("out"), dict.fromkeys(KINDS, "-"), None, dtype="float32"))
    vision = modality(base, None, read_config(base, None))
    own = proof.own_images

    def mixed(*args: Any) -> Any:
        found = own(*args)
        for rows in found.rows:
            rows["model.visual.merger.mlp.0"] = rows["model.visual.merger.mlp.0"].flip(0)
        return found

    monkeypatch.setattr("packlora.images.proof.own_images", mixed)
    with pytest.raises(InputError, match=r"in model\.visual\.merger\.mlp\.0 the rows of an image do not lie together"):
        load_base(run, None, {}, vision)


def test_an_adapter_is_evaluated_on_images(vision_base: Any, rows: dict[str, str], tmp_path: Path) -> None:
    base = vision_base("llava")
    peft = peft_model(base, KINDS["lora"])
    peft.save_pretrained(tmp_path / "adapter")
    found = evaluate_adapter(tmp_path / "adapter", rows["lora"], base_model=base, dtype="float64", device="cpu")
    assert found.loss == pytest.approx(evaluated(peft, own_inputs(base, rows["lora"])), abs=1e-10)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a pipeline": ({"parallel": {"pipeline": 2}}, {}, "its data has images, which parallel.pipeline does not take"),
    "experts": ({"parallel": {"expert": 2}}, {}, "its data has images, which parallel.expert does not take"),
    "a trainer": (
        {}, {"train": {"trainer": "kto", "loss_type": "apo_zero_unpaired"}}, "images, which train.trainer: kto does not take",
    ),
    "orthogonal factors of filters": (
        {}, {"adapter": {"target_modules": [r"patch_embed.proj"], "r": 4, "init_lora_weights": "orthogonal"}},
        "matches model.visual.patch_embed.proj, a convolution, for which there are no orthogonal factors",
    ),
    "filters that begin with the base's": (
        {}, {"adapter": {"target_modules": ["patch_embed.proj"], "lora_dropout": 0, "init_lora_weights": "pissa"}},
        "pissa is for linear layers, and target_modules matches model.visual.patch_embed.proj",
    ),
    "a norm of the tower": (
        {}, {"adapter": {"target_modules": ["q_proj"], "modules_to_save": ["norm1"]}}, "is part of the vision tower",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_images_do_not_go_with_is_refused_before_training(
    what: str, vision_base: Any, rows: dict[str, str], tmp_path: Path
) -> None:
    of_run, of_job, problem = REFUSED[what]
    job = {"name": "job", "data": {"path": rows["lora"]} | of_job.pop("data", {})} | of_job
    asked = tree(vision_base("qwen2_5_vl"), tmp_path / "out", rows, None, jobs=[job], **of_run)
    with pytest.raises(InputError, match=problem):
        prepare(Run.model_validate(asked))


def test_a_text_model_and_a_family_without_a_processor_are_refused(
    vision_base: Any, tiny_base: Callable[[str], str], rows: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="a llama model reads no images here, and some are given"):
        prepare(Run.model_validate(tree(tiny_base("llama"), tmp_path / "out", rows, None)))
    bare = tmp_path / "bare"
    shutil.copytree(vision_base("qwen2_5_vl"), bare)
    (bare / "preprocessor_config.json").unlink()
    with pytest.raises(InputError, match="its processor cannot be loaded"):
        prepare(Run.model_validate(tree(str(bare), tmp_path / "out", rows, None)))
