"""`packlora generate` and `chat` with images, held against what PEFT generates from the inputs of the model's own processor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from PIL import Image
from test_vision import KINDS, peft_model, plain_model
from typer.testing import CliRunner
from vision_models import image_row, vision_folder, write_images

import packlora
from packlora.answers.talk import Sampling, Speakers, load_speakers
from packlora.base.load import read_config
from packlora.cli import app
from packlora.errors import InputError
from packlora.export.merge import merge_adapter
from packlora.images import files
from packlora.images.vision import Vision

NEW = 10
PATCHES = "model.vision_tower.embeddings.patch_embedding.weight"


def user(text: str, number: int) -> dict[str, Any]:
    return {"role": "user", "content": [*[{"type": "image"}] * number, {"type": "text", "text": text}]}


class Answers:
    """A tiny model of a family, a LoRA and a DoRA adapter on all of its linear layers, and pictures."""

    def __init__(self, family: str, tokenizer: Any, folder: Path) -> None:
        self.base, self.folder = vision_folder(family, tokenizer, folder / "base"), folder
        for name, kind in KINDS.items():
            peft_model(self.base, kind).save_pretrained(folder / name)
        self.pictures = [str(folder / name) for name in write_images(folder, [(24, 16), (20, 40)], 3)]
        self.models: dict[str | None, Any] = {}

    def speakers(self, images: list[str] | None = None) -> Speakers:
        folders = [self.folder / name for name in KINDS]
        return load_speakers(folders, self.base, "float64", "cpu", images or [])

    def of_peft(self, name: str | None, messages: list[dict[str, Any]], pictures: list[str]) -> str:
        """By transformers' processor and generate, of which nothing is packlora's."""
        processor = Vision.of(self.base, None, read_config(self.base, None)).processor
        tokenizer = processor.tokenizer
        blocks = [
            one if isinstance(one["content"], list) else one | {"content": [{"type": "text", "text": one["content"]}]}
            for one in messages
        ]
        text = tokenizer.apply_chat_template(blocks, tokenize=False, add_generation_prompt=True)
        opened = [Image.open(path).convert("RGB") for path in pictures]
        inputs = processor(images=opened, text=[text], return_tensors="pt", add_special_tokens=False)
        own = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
        if name not in self.models:
            model = plain_model(self.base)
            if name is not None:
                model = PeftModel.from_pretrained(model, str(self.folder / name))
            self.models[name] = model.eval()
        ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
        out = self.models[name].generate(**own, max_new_tokens=NEW, do_sample=False, eos_token_id=ends)
        return str(tokenizer.decode(out[0, own["input_ids"].shape[1] :], skip_special_tokens=True))


def test_a_merged_model_reads_images_as_its_base_does(answers: Callable[[str], Answers], tmp_path: Path) -> None:
    """The adapter is DoRA, also on the convolution that patches are embedded by."""
    own = answers("llava")
    merge_adapter(own.folder / "dora", tmp_path / "merged", own.base)
    peft = PeftModel.from_pretrained(plain_model(own.base), str(own.folder / "dora")).eval()
    merged = plain_model(str(tmp_path / "merged")).eval()
    found, wanted = (
        {name: p.detach() for name, p in model.named_parameters()} for model in (merged, peft.merge_and_unload())
    )
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.allclose(found[name], weight, rtol=0, atol=1e-5), name
    base = plain_model(own.base).get_parameter(PATCHES)
    assert float((found[PATCHES] - base).abs().max()) > 1e-2
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (Path(own.base) / name).read_bytes()
    assert Vision.of(str(tmp_path / "merged"), None, read_config(str(tmp_path / "merged"), None)).processor is not None


def test_the_processor_s_template_goes_where_the_adapter_goes_where_the_tokenizer_has_none(
    tokenizer: Any, tmp_path: Path
) -> None:
    """Older folders have it in chat_template.json, which tokenizers do not read."""
    base, own = Path(vision_folder("llava", tokenizer, tmp_path / "base")), tmp_path / "out" / "seen"
    text = (base / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").unlink()
    (base / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    (picture,) = write_images(tmp_path, [(24, 16)])
    (tmp_path / "rows.jsonl").write_text(json.dumps(image_row([picture], "what is it", "the quick fox")) + "\n")
    (tmp_path / "own.jinja").write_text(text.replace("<|im_start|>", "<|im_start|>some "))
    job = {
        "name": "seen",
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "train": {"max_steps": 2, "learning_rate": 0.1},
    }
    others = {"chat_template": str(tmp_path / "own.jinja")}
    packlora.train(
        {
            "base_model": str(base), "output_dir": str(tmp_path / "out"), "device": "cpu", "sample_prompts": ["the quick"],
            "sample_max_new_tokens": 5, "eval_every": 2,
            "jobs": [job | {"data": job["data"] | {"eval_path": job["data"]["path"]}},
                     job | {"name": "other", "data": job["data"] | others}],
        }
    )  # fmt: skip
    samples = (json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines())
    (sample,) = [one for one in samples if one["job"] == "seen"][-1]["samples"]
    told = invoke("generate", str(own), "--prompt", sample["prompt"], "--max-new-tokens", "5")
    assert told.exit_code == 0 and told.stdout == sample["text"] + "\n", told.output
    shown = invoke("generate", str(own), "--image", str(tmp_path / picture), "--prompt", "a", "--max-new-tokens", "5")
    told = invoke("chat", str(own), "--max-new-tokens", "5", input=f"/image {tmp_path / picture}\na\n")
    assert told.exit_code == 0 and told.stdout == shown.stdout, told.output
    for name, wanted in (("seen", text), ("other", (tmp_path / "own.jinja").read_text())):
        merge_adapter(tmp_path / "out" / name, tmp_path / name)
        processor = Vision.of(str(tmp_path / name), None, read_config(str(tmp_path / name), None)).processor
        assert processor.chat_template == processor.tokenizer.chat_template == wanted


@pytest.fixture(scope="module")
def answers(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Answers]:
    made: dict[str, Answers] = {}

    def make(family: str) -> Answers:
        if family not in made:
            made[family] = Answers(family, tokenizer, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("family", ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.soak) for name in (
    "llava", "qwen3_vl", "gemma3", "llava_next"))])  # fmt: skip
def test_answers_on_images_are_those_of_peft(family: str, answers: Callable[[str], Answers]) -> None:
    """Of a LoRA, a DoRA and the base model; of one image, and in a second turn of one more. The tiny Gemma 3 says the same of
    whatever it is shown."""
    own = answers(family)
    speakers, found = own.speakers(), []
    for name in (*KINDS, None):
        talk = [user("what is it", 1)]
        first = speakers.answer(name or "base", talk, Sampling(NEW), own.pictures[:1])
        assert first == own.of_peft(name, talk, own.pictures[:1])
        talk += [{"role": "assistant", "content": "the quick fox"}, user("and this", 1)]
        second = speakers.answer(name or "base", talk, Sampling(NEW), own.pictures)
        assert second == own.of_peft(name, talk, own.pictures)
        turned = speakers.answer(name or "base", talk, Sampling(NEW), own.pictures[::-1])
        found += [first, second, turned]
    assert len({*found}) >= (3 if family == "gemma3" else 7), "adapters, turns and the order of images matter"


def invoke(*words: str, **how: Any) -> Any:
    return CliRunner().invoke(app, [*words], **how)


def test_generate_and_chat_take_images_by_the_command_line(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = answers("qwen2_5_vl")
    speakers = own.speakers()
    how = ["--base-model", own.base, "--dtype", "float64", "--max-new-tokens", str(NEW)]
    monkeypatch.chdir(own.folder)  # a path of the command line is looked up where one is
    one, two = (Path(path).name for path in own.pictures)
    told = invoke("generate", "dora", "--image", one, "--image", two, "--prompt", "both", *how)
    assert told.exit_code == 0, told.output
    assert told.stdout.rstrip("\n") == speakers.answer("dora", [user("both", 2)], Sampling(NEW), own.pictures).rstrip(
        "\n"
    )
    lines = f"/image {two}\nwhat is it\n/image no.png\n/image\nand now\n/reset\n/image {one}\n/reset\nthe fox\n"
    told = invoke("chat", "lora", "dora", "--image", one, *how, input=lines)
    assert told.exit_code == 0, told.output
    want = []
    for name in KINDS:  # the flag's image and the line's go with the first turn, and stay in the conversation
        talk = [user("what is it", 2)]
        first = speakers.answer(name, talk, Sampling(NEW), own.pictures)
        talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "and now"}]
        after = {"role": "user", "content": "the fox"}
        want.append(
            [
                first,
                speakers.answer(name, talk, Sampling(NEW), own.pictures),
                speakers.answer(name, [after], Sampling(NEW)),
            ]
        )
    lines_of = [
        f"{name}: {answer}" for turn in zip(*want, strict=True) for name, answer in zip(KINDS, turn, strict=True)
    ]
    assert told.stdout == "".join(f"{line}\n" for line in lines_of)
    assert "/image: the image no.png does not exist" in told.stderr
    assert "/image: give the path of a file behind it" in told.stderr


def test_an_image_that_cannot_be_shown_is_refused_before_weights_are_read(
    answers: Callable[[str], Answers], tiny_base: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = answers("llava")
    (tmp_path / "broken.png").write_bytes(Path(own.pictures[0]).read_bytes()[:90])
    (tmp_path / "text.png").write_text("no picture")
    Image.new("1", (6000, 6000)).save(tmp_path / "large.png")
    monkeypatch.setattr(files, "MOST_PIXELS", 2**20)
    monkeypatch.setattr("packlora.answers.talk.read_model", lambda *_: pytest.fail("weights were read"))
    words = ["generate", str(own.folder / "lora"), "--prompt", "a"]
    for more, said in (
        (["--image", str(tmp_path / "no.png")], "--image: the image .*no.png does not exist"),
        (["--image", str(tmp_path)], "--image: the image .* is no file"),
        (["--image", str(tmp_path / "broken.png")], "--image: the image .*broken.png cannot be decoded"),
        (["--image", str(tmp_path / "text.png")], "--image: the image .*text.png cannot be decoded; formats are PNG"),
        (["--image", str(tmp_path / "large.png")], "too large, at most 1048576 pixels .* make it smaller"),
        (["--image", own.pictures[0], "--raw"], "--image: an image goes by the chat template, and --raw"),
    ):
        out = invoke(*words, *more, "--base-model", own.base)
        assert out.exit_code == 2 and re.search(said, out.output), (more, out.output)
        assert "Traceback" not in out.output
    out = invoke(*words, "--image", own.pictures[0], "--base-model", tiny_base("llama"))
    assert out.exit_code == 2 and "a llama model reads no images here" in out.output, out.output


def test_images_that_do_not_fit_or_have_no_place_are_refused(answers: Callable[[str], Answers]) -> None:
    own = answers("llava")
    speakers = own.speakers(own.pictures)
    with pytest.raises(
        InputError, match=r"has \d+ tokens, the model's context 256, 320 of them of images; use smaller"
    ):
        speakers.answer("lora", [user("a", 20)], Sampling(NEW), own.pictures[:1] * 20)
    with pytest.raises(
        InputError, match=r"an image: the chat template shows 2 images .*, and 1 are given; .* in a text as"
    ):
        speakers.answer("lora", [user("the <image> here", 1)], Sampling(NEW), own.pictures[:1])
