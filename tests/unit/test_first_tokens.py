"""The tokens that begin and end a text stand there once, also where it was rendered before."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from packlora.config import DataConfig
from packlora.data.encode import Sample
from packlora.data.prompts import encode_prompts, prompt_ids
from packlora.data.rows import check_row
from packlora.data.samples import encode_rows
from packlora.data.tokens import leading, tokens_and_offsets
from packlora.errors import InputError

WORDS = ["the quick brown fox jumps over the lazy dog"] * 4
NAMES = ["<s>", "</s>", "<unk>", "[gMASK]", "<sop>", "<|im_start|>", "<|im_end|>"]
TWO = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATE = "{{ bos_token }}" + TWO + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def made(kind: str, first: Sequence[str] = ("<s>",), last: Sequence[str] = ()) -> Any:
    """A tokenizer whose post-processor puts tokens before and behind a text. kind: bytes, or words with ▁ for a space."""
    if kind == "bytes":
        bpe = Tokenizer(models.BPE(unk_token="<unk>"))
        bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        alphabet = list("▁abcdefghijklmnopqrstuvwxyz")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=NAMES, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(WORDS, trainer)
    steps = [processors.ByteLevel(trim_offsets=True)] if kind == "bytes" else []
    single = [*first, "$A", *last]
    numbers = [(name, bpe.token_to_id(name)) for name in {*first, *last}]
    steps.append(processors.TemplateProcessing(single=single, special_tokens=numbers))
    bpe.post_processor = processors.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


KINDS = [
    ("bytes", ("<s>",), ()), ("words", ("<s>",), ()), ("bytes", ("[gMASK]", "<sop>"), ()), ("bytes", ("<s>",), ("</s>",)),
    ("bytes", (), ()),
]  # fmt: skip


@pytest.fixture(params=KINDS, ids=str)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return made(*request.param)


def sample_of(row: dict[str, Any], tokenizer: Any) -> Sample:
    (sample,) = encode_rows([check_row(row, "row 1", "j")], tokenizer, DataConfig(path="-"), 4096, "j").samples
    return sample


def words(sample: Sample, tokenizer: Any) -> list[tuple[str, bool]]:
    """What the text of a sample is, and whether it is learnt, in pieces."""
    marked = zip(sample.ids.tolist(), sample.is_label.tolist(), strict=True)
    groups = itertools.groupby(marked, key=lambda item: item[1])
    return [(tokenizer.decode([token for token, _ in group]), is_label) for is_label, group in groups]


def rest_of(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_text_that_was_rendered_before_begins_with_its_first_tokens_once(tokenizer: Any) -> None:
    first = leading(tokenizer)
    begin = "".join(tokenizer.convert_ids_to_tokens(first))
    plain = sample_of({"text": "the fox"}, tokenizer)
    assert plain.ids.tolist() == [*first, *rest_of("the fox</s>", tokenizer)]
    rendered = sample_of({"text": f"{begin}the fox"}, tokenizer)
    assert rendered.ids.tolist() == rest_of(f"{begin}the fox</s>", tokenizer)
    assert rendered.ids.tolist()[: len(first)] == first
    assert rendered.is_label.tolist() == [False, *[True] * (rendered.num_tokens - 1)]
    assert rendered.ids.tolist().count(2) == plain.ids.tolist().count(2)


def test_a_prompt_is_gone_on_from_where_it_ends(tokenizer: Any) -> None:
    """Also where the tokenizer ends every text."""
    assert prompt_ids("the fox", tokenizer) == [*leading(tokenizer), *rest_of("the fox", tokenizer)]


def test_of_several_first_tokens_those_that_are_missing_are_put_before() -> None:
    tokenizer = made("bytes", ("[gMASK]", "<sop>"))
    assert prompt_ids("<sop>the", tokenizer) == rest_of("[gMASK]<sop>the", tokenizer)


@pytest.mark.parametrize("end", ["</s>", "</s>\n", "</s> \n\n"])
def test_a_text_that_has_ended_is_not_ended_again(end: str) -> None:
    tokenizer = made("bytes")
    for row in ({"text": f"the fox{end}"}, {"prompt": "the", "completion": f" fox{end}"}):
        assert sample_of(row, tokenizer).ids.tolist()[1:] == rest_of(f"the fox{end}", tokenizer)


def test_a_template_writes_the_first_token_itself() -> None:
    tokenizer = made("bytes")
    tokenizer.chat_template = TEMPLATE
    turns = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "fox"}]
    sample = sample_of({"messages": turns}, tokenizer)
    assert sample.ids.tolist()[:2] == [0, tokenizer.convert_tokens_to_ids("<|im_start|>")]
    assert words(sample, tokenizer)[-1] == ("fox<|im_end|>", True)


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.removeprefix("{{ bos_token }}")])
def test_a_prompt_that_was_rendered_before_is_not_rendered_again(template: str) -> None:
    tokenizer = made("bytes")
    tokenizer.chat_template = template
    begin = "<s><|im_start|>user" if template == TEMPLATE else "<|im_start|>user"
    row = {"prompt": f"{begin}\nthe<|im_end|>\n<|im_start|>assistant\n", "completion": "fox"}
    said = f"the prompt begins with {begin.split('user')[0][: 3 if template == TEMPLATE else None]!r}, as a text that was ren"
    with pytest.raises(InputError) as caught:
        sample_of(row, tokenizer)
    assert said in str(caught.value)
    with pytest.raises(InputError) as caught:
        encode_prompts(["fine", row["prompt"]], tokenizer, DataConfig(path="-"), 4, 64, "j")
    assert "sample_prompts.1: " + said in str(caught.value)
    assert sample_of({"prompt": "<|im_end|> ends a turn", "completion": "fox"}, tokenizer).num_labels
    fim = copy.deepcopy(row) | {"prompt": "<unk>the"}
    assert sample_of(fim, tokenizer).num_labels


def test_tokens_that_are_put_first_have_no_place_in_the_text_and_an_empty_text_has_no_others(tokenizer: Any) -> None:
    before, text = leading(tokenizer), "the fox"
    (none, nowhere), (ids, places) = tokens_and_offsets(["", text], tokenizer, False)
    assert none.tolist() == before and nowhere.shape == (len(before), 2) and not nowhere.any()
    assert ids.tolist()[: len(before)] == before and places.shape == (len(ids), 2) and places.dtype == np.int64
    assert not places[: len(before)].any()
    assert "".join(text[start:stop] for start, stop in places.tolist()).replace(" ", "") == "thefox"
