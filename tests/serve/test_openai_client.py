"""The public OpenAI client and Open WebUI's calls, over HTTP, to adapters that the public Tinker client has trained."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import http.client
import itertools
import json
import re
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from serving import NAME, host_of, served
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from waiting import SECONDS, wait_for

from packlora.data.template import set_clock
from packlora.engine.generate import Sampler
from packlora.serve import openai as endpoint
from packlora.serve.host import Host
from packlora.serve.openai_fields import ChatFields, CompletionFields

tinker = pytest.importorskip("tinker")
openai = pytest.importorskip("openai")
from tinker import types  # noqa: E402

KEYS = ["tml-the-first-one", "tml-the-other-one"]
IDS = list(range(60, 72))
TALK = [{"role": "user", "content": "the quick fox"}]


class World:
    """A service with an adapter that was trained, saved twice under one name, and downloaded."""

    def __init__(self, url: str, service: Any, folder: Path) -> None:
        self.url, self.service, self.folder = url, service, folder
        with tinker.ServiceClient(base_url=url, api_key=KEYS[0]) as client:
            own = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
            row = types.Datum(
                model_input=types.ModelInput.from_ints(IDS[:-1]), loss_fn_inputs={"target_tokens": IDS[1:]}
            )
            for _ in range(4):
                own.forward_backward([row], "cross_entropy")
                own.optim_step(types.AdamParams(learning_rate=1e-2))
            self.older = own.save_weights_for_sampler("tuned").result().path
            own.forward_backward([row], "cross_entropy")
            own.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            self.path = own.save_state("tuned").result().path
            external = own.save_weights_external("out").result().path
            urls = client.create_rest_client().get_external_weights_urls(external).result().urls
            for file, at in urls.items():
                (folder / file).write_bytes(urllib.request.urlopen(at).read())

    def client(self, key: str = KEYS[0]) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def request(self, body: Any) -> urllib.request.Request:
        return urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(),
            {"authorization": f"Bearer {KEYS[0]}", "content-type": "application/json"},
        )  # fmt: skip

    def post(self, body: Any) -> str:
        """The answer to a request as it is on the wire."""
        return str(urllib.request.urlopen(self.request(body), timeout=SECONDS).read().decode())

    def begin(self, body: Any) -> http.client.HTTPConnection:
        """A request that was sent, of which no answer was read."""
        own, asked = http.client.HTTPConnection(self.url.removeprefix("http://")), self.request(body)
        own.request("POST", asked.selector, asked.data, asked.headers)
        return own


@pytest.fixture(scope="module")
def world(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("serve")
    patch = pytest.MonkeyPatch()
    patch.setenv("TINKER_TELEMETRY", "0")
    with warnings.catch_warnings(), served(host_of(tiny_base("llama"), folder), folder / "state", KEYS) as (url, own):
        warnings.simplefilter("ignore")
        (folder / "adapter").mkdir()
        yield World(url, own, folder / "adapter")
    patch.undo()


@pytest.fixture(scope="module")
def peft(world: World, tiny_base: Callable[[str], str]) -> Any:
    base = AutoModelForCausalLM.from_pretrained(tiny_base("llama"))
    return PeftModel.from_pretrained(base, str(world.folder)).eval()


def test_greedy_text_is_that_of_peft_with_the_downloaded_adapter(world: World, peft: Any) -> None:
    tokenizer = next(iter(world.service.hosts.values())).tokenizer
    for prompt, model in ((IDS[:4], "tuned"), (IDS[:2], world.path), (IDS[:4], NAME)):
        ids = torch.tensor([prompt])
        with torch.no_grad(), peft.disable_adapter() if model == NAME else torch.no_grad():
            want = peft.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
                eos_token_id=[2, 5], pad_token_id=0,
            )[0, len(prompt) :]  # fmt: skip
        found = world.client().completions.create(
            model=model, prompt=prompt, max_tokens=12, temperature=0, logprobs=2, seed=1
        )
        assert found.choices[0].text == tokenizer.decode(want, skip_special_tokens=True), model
        assert found.usage.prompt_tokens == len(prompt)
        assert len(found.choices[0].logprobs.top_logprobs[0]) == 2


def test_a_key_sees_its_own_models_alone(world: World) -> None:
    own, other = ([model.id for model in world.client(key).models.list()] for key in KEYS)
    assert own == [NAME, "out", "tuned", world.older] and other == [NAME]
    for model in ("tuned", world.path):
        assert world.client().models.retrieve(model).id == model
        with pytest.raises(openai.NotFoundError, match="is not served"):
            world.client(KEYS[1]).chat.completions.create(model=model, messages=TALK)
    with pytest.raises(openai.AuthenticationError, match="not one of this service's keys"):
        world.client("tml-nobody-knows").models.list()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{world.url}/v1/models")
    said = json.load(refused.value)["error"]
    assert refused.value.code == 401 and "there is no key" in said["message"] and said["type"] == "authentication_error"
    newest = world.client().completions.create(model="tuned", prompt=IDS[:3], max_tokens=0, echo=True, logprobs=1)
    saved = world.client().completions.create(model=world.path, prompt=IDS[:3], max_tokens=0, echo=True, logprobs=1)
    older = world.client().completions.create(model=world.older, prompt=IDS[:3], max_tokens=0, echo=True, logprobs=1)
    scores = [one.choices[0].logprobs.token_logprobs[1:] for one in (newest, saved, older)]
    assert scores[0] == scores[1] != scores[2]


def test_streams_of_many_clients_are_those_of_whole_answers(world: World) -> None:
    how: dict[str, Any] = {"messages": TALK, "max_tokens": 10, "n": 2, "seed": 4, "logprobs": True}
    whole = {name: world.client().chat.completions.create(model=name, **how) for name in (NAME, "tuned")}

    async def streamed(client: Any, name: str) -> list[str]:
        out = ["", ""]
        async for chunk in await client.chat.completions.create(model=name, stream=True, **how):
            for choice in chunk.choices:
                out[choice.index] += choice.delta.content or ""
        return out

    async def together() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=KEYS[0]) as client:
            return await asyncio.gather(*(streamed(client, name) for name in (*whole, *whole)))

    for name, texts in zip((*whole, *whole), asyncio.run(together()), strict=True):
        assert texts == [choice.message.content for choice in whole[name].choices]
    stopped = whole["tuned"].choices[0].message.content[2:4]
    found = world.client().chat.completions.create(model="tuned", stop=[stopped], **how).choices[0]
    assert found.finish_reason == "stop" and stopped not in found.message.content


def test_calls_of_open_webui_are_answered(world: World) -> None:
    """Its list of models, a streamed chat with the fields that it adds, and the titles and tags that it asks for."""
    assert {"tuned", NAME} <= {model.id for model in world.client().models.list()}
    chat = {
        "stream": True, "model": "tuned", "messages": [{"role": "system", "content": "be brief"}, *TALK],
        "stream_options": {"include_usage": True}, "max_tokens": 8, "temperature": 0.8, "top_p": 0.9, "top_k": 40,
        "params": {}, "features": {"web_search": False}, "files": [], "tool_servers": [], "session_id": "a", "chat_id": "b",
        "id": "c", "background_tasks": {"title_generation": True}, "variables": {"{{USER_NAME}}": "me"},
        "filter_ids": [], "model_item": {"id": "tuned"}, "user": {"id": "1", "name": "me"}, "tool_ids": None,
    }  # fmt: skip
    lines = world.post(chat).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant" and chunks[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["model"] == "tuned" for chunk in chunks)
    title = {
        "model": "tuned",
        "messages": TALK,
        "stream": False,
        "max_completion_tokens": 6,
        "metadata": {"task": "title"},
    }
    assert json.loads(world.post(title))["choices"][0]["message"]["role"] == "assistant"


def test_a_chat_is_rendered_with_its_variables_and_the_present_date(tokenizer: PreTrainedTokenizerFast) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{{ strftime_now('%Y') }} {{ mood }} {{ messages[-1]['content'] }}"
    set_clock(own, datetime(1999, 1, 1))  # of an earlier rendering
    fields = ChatFields.model_validate({"model": "m", "messages": TALK, "chat_template_kwargs": {"mood": "brown"}})
    assert own.decode(fields.ids(own)) == f"{datetime.now():%Y} brown {TALK[0]['content']}"


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    texts = ["".join(letters) for count in range(7) for letters in itertools.product("ab", repeat=count)]
    for stop in texts[1:]:
        for text in texts:
            want = max(n for n in range(len(stop)) if n == 0 or text.endswith(stop[:n]))
            assert endpoint._overlap(text, stop) == want, (text, stop)


def test_what_would_change_an_answer_and_is_not_served_is_refused_by_name(world: World) -> None:
    called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for more, words in (
        ({"messages": [*TALK, {"role": "assistant", "tool_calls": [called]}]}, "tool_calls are not served"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "'chat_template' is no variable"),
        ({"chat_template_kwargs": {"messages": []}}, "'messages' is no variable"),
        ({"chat_template": "{{ 1 }}"}, "chat_template: .* is not served"),
        ({"min_p": 0.1}, "min_p: 0.1 is not served"),
        ({"stop": ["a" * 1025]}, "at most 1024 characters"),
        ({"ignore_eos": True}, "ignore_eos: True is not served"),
        ({"tool_choice": "required"}, "tool_choice: 'required' is not served"),
        ({"guided_choice": ["a", "b"]}, r"guided_choice: \['a', 'b'\] is not served"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs: .* is not served"),
        ({"skip_special_tokens": False}, "skip_special_tokens: False is not served"),
        ({"messages": [{"role": "assistant", "function_call": called["function"]}]}, "function_call is not served"),
        ({"top_logprobs": 2}, "top_logprobs: it needs logprobs: true"),
        ({"stream": "x"}, "^stream: .*valid boolean"),
        ({"stream_options": 5}, "^stream_options: .*found 5"),
        ({"stop": ["a"] * 17}, "^stop: .*at most 16 items"),
        ({"stop": ["a", 1]}, "^stop.1: .*valid string; found 1"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            world.post({"model": NAME, "messages": TALK, "max_tokens": 1} | more)
        said = json.load(refused.value)["error"]
        assert refused.value.code == 400 and re.search(words, said["message"]), said
    harmless = {
        "min_p": 0,
        "ignore_eos": False,
        "modalities": ["text"],
        "chat_template_kwargs": {"enable_thinking": False},
        "tool_choice": "auto",
        "skip_special_tokens": True,
        "top_logprobs": 0,
    }
    assert json.loads(world.post({"model": NAME, "messages": TALK, "max_tokens": 1} | harmless))["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_are_none_are_refused_with_the_place_of_what_is_wrong(stream: bool, world: World) -> None:
    complete = world.client().completions.create
    for prompt, words in (
        ([], "prompt: it has no tokens"), ([[]], "prompt: it has no tokens"), ([[7], [7, -1]], "prompt.1.1: .*found -1"),
        ([7, "a"], "prompt.1: .*found 'a'"), (["a"] * 65, "prompt: .*at most 64 items"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError, match=words):
            complete(model=NAME, prompt=prompt, stream=stream)
    assert complete(model=NAME, prompt=[7], max_tokens=0, echo=True).usage.completion_tokens == 0


def test_a_list_is_read_to_its_first_wrong_member() -> None:
    """To describe a million holds up everybody."""
    many = 1000
    wrong = {"prompt": [[-1] * many, [7] * many + ["a"] * many, ["a"] * many + [7] * many], "stop": [[7] * many]}
    for field, values in wrong.items():
        for value in values:
            with pytest.raises(ValidationError) as refused:
                CompletionFields.model_validate({"model": "a", "prompt": "a"} | {field: value})
            assert refused.value.error_count() < 8, (field, value[:3])
    for messages in ([{}] * many, [{"role": "user", "content": [7] * many}] * many):
        with pytest.raises(ValidationError) as refused:
            ChatFields.model_validate({"model": "a", "messages": messages})
        assert refused.value.error_count() < 8


def test_a_token_that_is_a_part_of_a_character_has_no_bytes(world: World) -> None:
    """Those of the others are the bytes of their text: the client joins them."""
    asked = {"max_tokens": 64, "temperature": 2.0, "seed": 3, "logprobs": True}
    found = world.client().chat.completions.create(model=NAME, messages=TALK, **asked).choices[0].logprobs.content
    parts = [own for own in found if "\ufffd" in own.token]
    assert parts and all(own.bytes is None for own in parts)
    assert all(bytes(own.bytes).decode() == own.token for own in found if own not in parts)


def test_offsets_are_places_of_tokens_in_the_text(world: World) -> None:
    """Also behind a character of several tokens."""
    asked = {"prompt": "\u00e9 quick \u4e2d fox", "max_tokens": 20, "echo": True, "logprobs": 0, "seed": 1}
    found = world.client().completions.create(model=NAME, **asked).choices[0]
    tokens, offsets = found.logprobs.tokens, found.logprobs.text_offset
    whole = [at for at, token in enumerate(tokens) if "\ufffd" not in token]
    asked_for = [at for at in whole if offsets[at] < len(asked["prompt"])]
    assert len(whole) < len(tokens) and len(asked_for) == 3 and offsets == sorted(offsets)
    assert all(found.text[offsets[at] :].startswith(tokens[at]) for at in asked_for)


def test_an_adapter_that_is_not_its_trainers_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "take", lambda host, adapter, state, found: adapter.flat.zero_())
    with pytest.raises(openai.InternalServerError, match="sampler and the trainer differ"):
        world.client().completions.create(model="out", prompt="a")
    assert world.client().completions.create(model=NAME, prompt="a", max_tokens=2).usage.completion_tokens


def test_clients_that_leave_and_checkpoints_that_go_leave_nothing_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "LOOK_SECONDS", 0.05)
    host, step, drawn = next(iter(world.service.hosts.values())), Sampler.step, itertools.count()
    # so that nothing ends by itself
    monkeypatch.setattr(Sampler, "step", lambda own: step(own) if next(drawn) < 2 else [])
    with contextlib.closing(world.begin({"model": NAME, "messages": TALK, "n": 100, "max_tokens": 200})):
        wait_for(lambda: host.samples == 100)
    wait_for(lambda: not host.samples)
    drawn = itertools.count()
    with world.client().chat.completions.create(model=NAME, messages=TALK, max_tokens=200, stream=True) as chunks:
        next(iter(chunks))
        assert host.samples == 1
    wait_for(lambda: not host.samples and not world.service._listeners)
    monkeypatch.undo()
    with pytest.raises(openai.BadRequestError, match="the model's context 256"):
        world.client().completions.create(model=NAME, prompt=[7] * 300)
    rest = tinker.ServiceClient(base_url=world.url, api_key=KEYS[0]).create_rest_client()
    rest.delete_checkpoint_from_tinker_path(world.older).result()
    with pytest.raises(openai.NotFoundError, match="is not served"):
        world.client().completions.create(model=world.older, prompt="a")
