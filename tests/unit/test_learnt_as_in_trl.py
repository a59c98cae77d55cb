"""What is learnt of conversations on published chat templates: TRL's assistant masks, and the words of every part, judge it.

TRL's wheel has published templates, and beside most a twin whose `{% generation %}` tags mark what the assistant writes.
The published template goes through rows and samples; the twin through transformers. TRL itself is not imported.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as pillow
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from packlora.config import DataConfig
from packlora.data.encode import Sample
from packlora.data.prompts import answer_ends, taught_end
from packlora.data.rows import check_row
from packlora.data.samples import encode_rows
from packlora.errors import InputError
from packlora.images.files import Shown

_SPEC = importlib.util.find_spec("trl")
_PLACES = (
    [Path(place) / "chat_templates" for place in (_SPEC.submodule_search_locations or ()) if _SPEC] if _SPEC else []
)
FILES = sorted(file for place in _PLACES for file in place.glob("*.jinja") if not file.stem.endswith("_training"))
TAG = re.compile(r"<[|｜]?[^<>\s\"'{}%]{1,38}[|｜]?>|\[/?[A-Z_]{2,30}\]")
WORD = re.compile(r"[^\W_]{3,}")
STOP = "<|tool_response>"
"""Gemma's stop token behind a call: TRL does not learn it, the model's documentation says that it ends a call."""
SHARED_END = {("glm4moe", "calluser"), ("glm4moe", "twoanswers")}
"""GLM ends no turn, and its twin moves the next header's token into the turn: another one than the published text has there."""
BY_PARTS = ("weight", "empty")
"""Conversations that the twins do not judge: they know no weights, and learn the end of an answer that says nothing."""
Turns = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, name: str = "weather") -> dict[str, Any]:
    return {"role": "tool", "name": name, "content": text}


SYSTEM, ASKED, AGAIN = {"role": "system", "content": "sysword"}, user("uone"), user("utwo")
PARIS, CLOCK = call("weather", city="paris"), call("clocks", zone="utc")
CALLS, DONE = answer("", tool_calls=[PARIS]), result("tresult")
TEXT = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "paris"}'}}
NESTED = call("weather", many=3, half=1.5, deep={"kind": ["vase", {"with": "xylo"}]})
CONVERSATIONS: dict[str, Turns] = {
    "one": [ASKED, answer("aone")],
    "two": [ASKED, answer("aone"), AGAIN, answer("atwo")],
    "system": [SYSTEM, ASKED, answer("aone")],
    "developer": [{"role": "developer", "content": "devword"}, ASKED, answer("aone")],
    "equal": [user("echo"), answer("echo"), user("echo"), answer("echo")],
    "tool": [ASKED, CALLS, DONE, answer("aone")],
    "says and calls": [ASKED, answer("asay", tool_calls=[PARIS]), DONE, answer("aone")],
    "calls last": [ASKED, CALLS],
    "reasons": [ASKED, answer("aone", reasoning_content="rone")],
    "thought alone": [ASKED, answer("", reasoning_content="rone")],
    "thinks": [ASKED, answer("<think>\nrone\n</think>\n\naone")],
    "thinks loosely": [ASKED, answer("<think>rone</think>aone")],
    "opens": [answer("aone"), ASKED, answer("atwo")],
    "lines": [ASKED, answer("aone\n\nbone\n"), AGAIN, answer("  atwo")],
    "parallel": [ASKED, answer("", tool_calls=[PARIS, CLOCK]), DONE, result("tother", "clocks"), answer("aone")],
    "steps": [ASKED, CALLS, DONE, answer("", tool_calls=[CLOCK]), result("tother", "clocks"), answer("aone")],
    "calluser": [ASKED, CALLS, AGAIN, answer("aone")],
    "twoanswers": [ASKED, answer("aone"), answer("atwo")],
    "empty": [ASKED, answer(""), AGAIN, answer("atwo")],
    "system in the middle": [ASKED, answer("aone"), SYSTEM, AGAIN, answer("atwo")],
    "reasons and calls": [
        ASKED, answer("", reasoning_content="rone", tool_calls=[PARIS]), DONE, answer("aone", reasoning_content="rtwo"),
    ],
    "reasons and calls last": [ASKED, answer("", reasoning_content="rone", tool_calls=[PARIS])],
    "history": [ASKED, answer("aone", reasoning_content="rone"), AGAIN, answer("atwo", reasoning_content="rtwo")],
    "user last": [ASKED, answer("aone"), AGAIN],
    "unicode": [user("süßer 漢字漢字"), answer("ответ 🙂 écrit")],
    "markers": [user("uone <|im_end|> <|eot_id|>"), answer("aone </s> here")],
    "nested": [ASKED, answer("", tool_calls=[NESTED]), DONE, answer("aone")],
    "as text": [ASKED, answer("", tool_calls=[TEXT]), DONE, answer("aone")],
    "all": [SYSTEM, ASKED, answer("asay", tool_calls=[PARIS]), DONE, answer("aone"), AGAIN, answer("atwo")],
    "weight": [ASKED, answer("aone", weight=0), AGAIN, answer("atwo")],
}  # fmt: skip


def tokenizer_of(source: str) -> PreTrainedTokenizerFast:
    """Tokens of single bytes, and the template's markers, so that what is learnt is exact to the letter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    out = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    markers = sorted(tag for tag in set(TAG.findall(source)) if not re.fullmatch(r"</?[a-z_]+>", tag))
    out.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in markers], special_tokens=True)
    out.chat_template = source
    return out


def encoded(tokenizer: Any, turns: Turns, folder: Path | None = None, shown: Shown | None = None) -> Sample:
    row = check_row({"messages": turns}, "row 1", "j", str(folder))
    (sample,) = encode_rows([row], tokenizer, DataConfig(path="-"), 10**6, "j", reader=shown).samples
    return sample


def pieces_of(tokenizer: Any, sample: Sample) -> list[str]:
    marked = zip(sample.ids.tolist(), sample.is_label.tolist(), strict=True)
    groups = itertools.groupby(marked, key=lambda item: item[1])
    return [str(tokenizer.decode([token for token, _ in group])) for is_label, group in groups if is_label]


def learnt(tokenizer: Any, turns: Turns) -> list[str]:
    return pieces_of(tokenizer, encoded(tokenizer, turns))


# --- what judges it ----------------------------------------------------------------------------------------------------------


def spellings(turns: Turns) -> Iterator[Turns]:
    """A conversation in the forms that templates take: arguments as mappings or as texts, contents as texts or as blocks."""
    for in_blocks, as_text in itertools.product((False, True), repeat=2):
        said = []
        for turn in turns:
            own = {key: value for key, value in turn.items() if key != "weight"}
            if "tool_calls" in own:
                values = [one["function"] for one in own["tool_calls"]]
                plain = [
                    v["arguments"] if isinstance(v["arguments"], dict) else json.loads(v["arguments"]) for v in values
                ]
                given = [json.dumps(value) if as_text else value for value in plain]
                own["tool_calls"] = [
                    call(v["name"]) | {"function": v | {"arguments": a}} for v, a in zip(values, given, strict=True)
                ]
            if in_blocks:
                own["content"] = [{"type": "text", "text": own["content"]}]
            said.append(own)
        yield said


def written(source: str, tokenizer: Any, turns: Turns, mask: bool = False) -> tuple[str, list[tuple[int, int]]] | None:
    """What a template writes, in the first spelling of which it shows every part, and what it marks; None: there is none."""
    parts = words(turns, True) | words(turns, False)
    for said in spellings(turns):
        try:
            texts, spans = render_jinja_template(
                conversations=[said],
                chat_template=source,
                return_assistant_tokens_mask=mask,
                **tokenizer.special_tokens_map,
            )
        except Exception:  # templates raise what they like
            continue
        if all(part in texts[0] for part in parts):
            return texts[0], spans[0] if spans else []
    return None


def words(turns: Turns, assistant: bool) -> set[str]:
    """The words of what is to be learnt, or of all others; thoughts of earlier turns may go."""
    texts: list[str] = []
    for number, turn in enumerate(turns):
        if (turn["role"] == "assistant" and turn.get("weight") != 0) is not assistant:
            continue
        texts.append(turn["content"])
        for one in turn.get("tool_calls", ()):
            texts += [one["function"]["name"], json.dumps(one["function"]["arguments"])]
        if number + 1 == len(turns):
            texts.append(turn.get("reasoning_content", ""))
    return {word for text in texts for word in WORD.findall(TAG.sub(" ", text))}


def plain(text: str, headers: list[str]) -> str:
    """A text without white space, without headers, and without thoughts of earlier turns, which twins lay out in every turn."""
    for left_out in (*headers, STOP, "<think>", "</think>", "rone"):
        text = text.replace(left_out, "")
    return re.sub(r"\s", "", text)


def headers_of(source: str, tokenizer: Any) -> list[str]:
    """Tags with which the model's turn is opened, in their order; of DeepSeek also what ends the results of tools."""
    prompts = []
    for generation in (False, True):
        (text,), _ = render_jinja_template(
            conversations=[[user("q")]],
            chat_template=source,
            add_generation_prompt=generation,
            **tokenizer.special_tokens_map,
        )
        prompts.append(text)
    header = prompts[1].removeprefix(prompts[0]) if prompts[1].startswith(prompts[0]) else ""
    return ["<｜tool▁outputs▁end｜>", *TAG.findall(header), "assistant"]


def judged(
    name: str, turns: Turns, file: Path, tokenizer: Any, headers: list[str], learn: Callable[[], list[str]]
) -> str | None:
    """What is wrong with what is learnt of a conversation; None: nothing. learn: gives the pieces, or refuses."""
    own, others = words(turns, True), words(turns, False)
    shown = written(file.read_text(), tokenizer, turns)
    try:
        pieces = learn()
    except InputError as error:
        return f"is refused: {error}" if shown else None
    whole = "\n".join(pieces)
    if not shown:
        return "is taken, though the template does not show all of it"
    if missing := {word for word in own if word not in whole}:
        return f"does not learn {missing}"
    if wrong := {word for word in others - own if word in whole}:
        return f"learns {wrong} of others"
    if opened := [piece for piece in pieces if piece.lstrip().startswith(tuple(headers[:2]))]:
        return f"learns a header: {opened}"
    twin = file.with_name(f"{file.stem}_training.jinja")
    if not twin.exists() or name in BY_PARTS or (file.stem, name) in SHARED_END:
        return None
    marked = written(twin.read_text(), tokenizer, turns, mask=True)
    if marked is None:
        return None
    text, spans = marked
    wanted = plain("".join(text[start:stop] for start, stop in spans), headers)
    return None if plain(whole, headers) == wanted else f"learns {plain(whole, headers)!r}, and TRL {wanted!r}"


@pytest.mark.skipif(not FILES, reason="TRL's wheel is not there; make test installs it, without what it needs")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_learnt_is_what_trl_marks_and_every_part_of_the_assistant_alone(file: Path) -> None:
    tokenizer = tokenizer_of(file.read_text())
    headers = headers_of(file.read_text(), tokenizer)
    wrong = {
        name: judged(name, turns, file, tokenizer, headers, lambda turns=turns: learnt(tokenizer, turns))
        for name, turns in CONVERSATIONS.items()
    }
    assert not {name: problem for name, problem in wrong.items() if problem}


@pytest.mark.skipif(not FILES, reason="TRL's wheel is not there; make test installs it, without what it needs")
@pytest.mark.parametrize("name", ["gptoss", "muse_glimmer", "qwen3"])
def test_a_thought_of_white_space_is_none_and_a_content_that_is_null_is_empty(name: str) -> None:
    (file,) = (file for file in FILES if file.stem == name)
    tokenizer = tokenizer_of(file.read_text())
    plain, blank = ([ASKED, answer("aone", **more)] for more in ({}, {"reasoning_content": " \n"}))
    assert encoded(tokenizer, blank).ids.tolist() == encoded(tokenizer, plain).ids.tolist()
    null = [ASKED, {"role": "assistant", "content": None, "reasoning_content": "rone"}]
    assert learnt(tokenizer, null) == learnt(tokenizer, CONVERSATIONS["thought alone"])


STOPS = {
    "qwen": ["<|im_end|>", "<|endoftext|>"], "lfm2": ["<|im_end|>"], "nemotron": ["<|im_end|>"],
    "gptoss": ["<|return|>", "<|call|>"], "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "phi3": ["<eos>", "<|assistant|>", "<|end|>"],
    "llama3": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "deepseek": ["<｜end▁of▁sentence｜>"], "llava": ["</s>"],
    "gemma4": ["<eos>", "<turn|>", "<|tool_response>"], "diffusion_gemma": ["<eos>", "<turn|>", "<|tool_response>"],
    "gemma": ["<eos>", "<end_of_turn>"], "cohere": ["<|END_OF_TURN_TOKEN|>"], "idefics3": ["<end_of_utterance>"],
    "smolvlm": ["<end_of_utterance>"], "muse": ["<|eot|>"],
}  # fmt: skip
"""Tokens that end an answer of models, by how the names of their templates begin. Not all models' settings name them: the
config.json of Idefics3 has those of Llama 3 alone, so its answers run on past their end."""


@pytest.mark.skipif(not FILES, reason="TRL's wheel is not there; make test installs it, without what it needs")
def test_answers_are_learnt_to_end_with_a_token_at_which_their_models_stop() -> None:
    for file in FILES:
        tokenizer, name = tokenizer_of(file.read_text()), next(filter(file.stem.startswith, STOPS))
        tokenizer.add_tokens(STOPS[name], special_tokens=True)
        end = taught_end(tokenizer)
        assert end in tokenizer.convert_tokens_to_ids(STOPS[name]), file.stem
        assert end in answer_ends(tokenizer, None)


# --- images in turns ---------------------------------------------------------------------------------------------------------

SEEN = {
    "qwen2_5_vl": ("<|image_pad|>", "{}"), "qwen3_vl": ("<|image_pad|>", "{}"), "qwen3_5": ("<|image_pad|>", "{}"),
    "qwen3_8": ("<|image_pad|>", "{}"), "gemma3": ("<start_of_image>", "\n\n<start_of_image>{}<end_of_image>\n\n"),
    "gemma4_v5": ("<|image|>", "<|image>{}<image|>"), "diffusion_gemma": ("<|image|>", "<|image>{}<image|>"),
    "idefics3": ("<image>", "<fake_token_around_image><global-img>{}<fake_token_around_image>"),
    "smolvlm": ("<image>", "<fake_token_around_image><global-img>{}<fake_token_around_image>"),
    "llava_next": ("<image>", "{}"), "lfm2_2_5_vl": ("<image>", "<|image_start|>{}<|image_end|>"), "muse": ("<|patch|>", "{}"),
}  # fmt: skip
"""What published templates write for an image, by how their names begin, and what processors put around its tokens."""
SOFT = "<image_soft_token>"
NO_RESULTS = ("does not show its tool_calls", "roles must alternate", "Only user and assistant roles")
"""Said of templates that know no results."""


class Vision:
    """An image is as many tokens as it is wide."""

    def __init__(self, tokenizer: Any, mark: str, around: str) -> None:
        tokenizer.add_tokens([SOFT, mark, *TAG.findall(around)], special_tokens=True)
        self.image_mark, self.around, self.token_id = mark, around, tokenizer.convert_tokens_to_ids(SOFT)

    def text_of(self, image: pillow.Image) -> str:
        return self.around.format(SOFT * image.width)

    def count(self, text: str) -> int:
        return text.count(SOFT)


def blocks(*parts: int | str, **more: Any) -> dict[str, Any]:
    """A message of texts and of images, which are given as their widths."""
    made = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "path": f"{part}.png"}
        for part in parts
    ]
    return {"role": "user", "content": made, **more}


TOOL = {"role": "tool", "name": "weather"}
WITH_IMAGES: dict[str, Turns] = {
    "two": [blocks(2, "uone"), answer("aone"), blocks("see", 3, "and", 5, "utwo"), answer("atwo")],
    "no words": [blocks(2), answer("aone"), blocks(3, 5), answer("atwo")],
    "behind": [SYSTEM, blocks("uone", 2), answer("aone"), AGAIN, answer("atwo"), blocks("uthree", 3), answer("athree")],
    "a result": [ASKED, CALLS, blocks("tresult", 2, **TOOL), answer("aone"), blocks(3, "utwo"), answer("atwo")],
    "a result without words": [blocks("uone", 3), CALLS, blocks(2, **TOOL), answer("aone")],
}


@pytest.mark.skipif(not FILES, reason="TRL's wheel is not there; make test installs it, without what it needs")
@pytest.mark.parametrize("family", SEEN)
def test_images_in_turns_and_results_are_never_learnt_and_move_what_is(family: str, tmp_path: Path) -> None:
    """Judged by the same conversation with a word in the place of each image."""
    mark, around = SEEN[family]
    for width in (2, 3, 5):
        pillow.new("RGB", (width, 4)).save(tmp_path / f"{width}.png")
    for file in (file for file in FILES if file.stem.startswith(family)):
        tokenizer = tokenizer_of(file.read_text())
        shown = Shown(Vision(tokenizer, mark, around))
        for name, turns in WITH_IMAGES.items():
            widths = [int(block["path"][0]) for turn in turns for block in turn["content"] if "path" in block]
            worded = [
                turn | {"content": "".join(block.get("text", "imageword") for block in turn["content"])}
                if isinstance(turn["content"], list)
                else turn
                for turn in turns
            ]
            try:
                sample = encoded(tokenizer, turns, tmp_path, shown)
            except InputError as error:
                problem = str(error)
                if "result" in name and any(what in problem for what in NO_RESULTS):
                    continue
                raise
            assert pieces_of(tokenizer, sample) == learnt(tokenizer, worded), (file.stem, name)
            text = str(tokenizer.decode(sample.ids.tolist()))
            assert text.count(SOFT) == sum(widths) and SOFT not in "".join(pieces_of(tokenizer, sample))


@pytest.mark.skipif(not FILES, reason="TRL's wheel is not there; make test installs it, without what it needs")
def test_most_templates_have_a_twin_and_are_compared() -> None:
    twins = [file for file in FILES if file.with_name(f"{file.stem}_training.jinja").exists()]
    assert len(FILES) >= 40 and len(twins) >= 30
