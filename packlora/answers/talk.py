"""`packlora generate` and `packlora chat`: what adapters answer, several from one loaded base model.

All that is asked at once is sampled in one batch (engine/generate.py); questions with images, and models whose cache is not
of keys and values alone, by transformers' own `generate`. A prompt is rendered and tokenized as in training (data/encode.py):
by the tokenizer's chat template, or as plain text where there is none or where it is asked for. An answer ends where training
ends a turn, or where the model's generation settings say.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from packlora.adapters.attach import Adapter, attach
from packlora.adapters.linear import Attached
from packlora.adapters.reading import load_adapter, read_trained_on
from packlora.base.cached_proof import other_cache, own_probe
from packlora.base.device import choose_device
from packlora.base.load import read_config as read_base_config
from packlora.base.load import read_model, read_tokenizer
from packlora.base.own_tokenizer import own_template, unused_note
from packlora.base.packing import prepare_model
from packlora.base.shape import context_of
from packlora.codes.plugin import Form, form_of_answers
from packlora.commands.adapter_folder import of_the_base, same_base, trained_by
from packlora.config import DataConfig
from packlora.data.prompts import answer_ends, prompt_ids
from packlora.data.template import Template, templated
from packlora.engine.generate import Sampler, sample, sampler_for
from packlora.engine.library_sampler import LibrarySampler, settings_that_change
from packlora.engine.rows import NO_ADAPTER
from packlora.engine.sampling import SampleRequest
from packlora.errors import InputError, quoted
from packlora.images.asked import AskedImages
from packlora.runtime.continued import resolve_folder
from packlora.terminal import obeys, on, say, show, standard_output

BASE = "base"
"""Name of the base model without an adapter."""
RESET, IMAGE, SYSTEM, HELP, EXIT = "/reset", "/image", "/system", "/help", "/exit"
COMMANDS = {
    RESET: "begins anew", f"{SYSTEM} TEXT": "begins anew with a message of the system, none without TEXT", HELP: "shows this",
    EXIT: "ends, as Ctrl-D",
}  # fmt: skip
OF_IMAGES = {f"{IMAGE} FILE": "shows an image with the next line"}


Said = str | list[dict[str, Any]]
"""Plain text, or the messages of a conversation."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of an answer. temperature 0 takes the likeliest token each time; else tokens are drawn from all of
    them. seed: an answer depends on it and on its own question, not on what else is asked."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Speakers:
    """A base model with adapters that answer. adapters: by the name that they are shown under."""

    model: Any
    tokenizer: Any
    adapters: dict[str, Adapter]
    context: int
    ends: list[int]
    """Tokens that end an answer."""
    images: AskedImages
    sampler: Sampler | LibrarySampler
    seeing: LibrarySampler
    """Sampling of questions with images."""
    templates: dict[str, str] = field(default_factory=dict)
    """Chat templates of adapters that were trained with another one than the base's, by name."""
    data: Mapping[str, DataConfig] = field(default_factory=dict)
    """Settings by which the rows of adapters that packlora trained were read, by name."""

    @property
    def attached(self) -> Attached:
        """State that the adapted layers share."""
        return self.seeing.attached

    def tokenizer_of(self, name: str) -> Any:
        """The base's tokenizer with the chat template of an adapter, or of BASE."""
        return templated(self.tokenizer, self.templates.get(name))

    def variables_of(self, name: str) -> Mapping[str, Any]:
        """Variables of the chat template in the run of an adapter."""
        return self.data[name].chat_template_kwargs if name in self.data else {}

    def answer(self, name: str, said: Said, how: Sampling, paths: Sequence[str] = ()) -> str:
        """Generate the answer of an adapter, or of BASE. Arguments and errors as those of `question`."""
        return self.answers([self.question(name, said, how, paths)])[0]

    def question(self, name: str, said: Said, how: Sampling, paths: Sequence[str] = ()) -> SampleRequest:
        """Make the request for an answer of an adapter, or of BASE.

        Args:
            said: plain text that is continued, or the messages of a conversation.
            paths: of the images of the messages, in the order of their blocks {"type": "image"}.

        Raises:
            InputError: the chat template refuses the messages, they fill the model's context, or a file is no image for this
                model.
        """
        ids, seen = self._inputs(name, said, paths)
        if self.context - ids.shape[1] < 1:
            shown = f", {self.images.tokens_of(ids)} of them of images; use smaller ones" if paths else ""
            raise InputError(f"the prompt has {ids.shape[1]} tokens, the model's context {self.context}{shown}")
        return SampleRequest(
            tuple(ids[0].tolist()), self.adapters[name].number if name != BASE else NO_ADAPTER, how.max_new_tokens,
            temperature=how.temperature, seed=how.seed, stop_tokens=frozenset(self.ends), arguments=seen,
        )  # fmt: skip

    def asked(
        self, prompts: Sequence[Said], system: str | None, raw: bool, how: Sampling, images: Sequence[str] = ()
    ) -> list[SampleRequest]:
        """Make the requests for answers of the first adapter to prompts. Arguments are those of `generate`, errors those of
        `question`."""
        name = next(iter(self.adapters))
        tokenizer = self.tokenizer_of(name)
        talk = Talk(system, raw or not tokenizer.chat_template)
        texts = [] if talk.raw else [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            Template(tokenizer).check_new(text, "go on from it by --raw, in Python raw=True")
        if texts:
            self.note_systems(system)
        said = [talk.asked(prompt, images) if isinstance(prompt, str) else prompt for prompt in prompts]
        return [self.question(name, one, how, images) for one in said]

    def note_systems(self, system: str | None) -> None:
        """Note adapters that were trained with a message of the system, where there is none."""
        for name, data in self.data.items() if system is None else ():
            if data.system is not None:
                say(
                    f"{name} was trained with the system message {quoted(data.system, 80)}, and is asked without one; --system "
                    "gives one, in Python system="
                )

    def answers(self, questions: Sequence[SampleRequest]) -> list[str]:
        """Generate answers to all of these, in one batch where none has images."""
        sampler = self.seeing if any(question.arguments for question in questions) else self.sampler
        found = [[token.id for token in tokens] for (tokens,) in sample(sampler, questions)]
        return [str(self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in found]

    def _inputs(self, name: str, said: Said, paths: Sequence[str]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Token ids [1, T], and the model's arguments for the images."""
        tokenizer, variables = self.tokenizer_of(name), self.variables_of(name)
        if paths and isinstance(said, list):
            return self.images.inputs(said, paths, tokenizer, self.model, variables)
        return torch.tensor([prompt_ids(said, tokenizer, variables=variables)], device=self.model.device), {}


@dataclass(frozen=True, slots=True)
class BaseOf:
    """Base model that adapters share, before its weights are read. trained_on: how it was quantised when each was trained."""

    path: str
    revision: str | None
    config: Any
    dtype: torch.dtype
    device: torch.device
    form: Form | None
    trained_on: Mapping[Path, dict[str, Any] | None]

    @staticmethod
    def of(folders: Sequence[Path], base_model: str | None, dtype: str, device: str) -> BaseOf:
        """Arguments and errors as those of load_speakers."""
        if dtype not in ("auto", "float32", "bfloat16", "float16", "float64"):
            raise InputError(f"dtype {dtype!r} is not one of auto, float32, bfloat16, float16")
        place, (path, revision) = choose_device(device), same_base(folders, base_model)
        trained = trained_by(folders[0])
        with of_the_base():
            config = read_base_config(path, revision)
            chosen = getattr(torch, trained.run.dtype) if trained else config.dtype or torch.float32
            kind = chosen if dtype == "auto" else getattr(torch, dtype)
            trained_on = {folder: read_trained_on(folder) for folder in folders}
            form = form_of_answers(config, path, [told or {} for told in trained_on.values()], place)
        return BaseOf(path, revision, config, kind, place, form, trained_on)

    def load(self, for_peft: bool = False) -> Any:
        """The model on its device, in evaluation mode. for_peft: quantised layers are their library's."""
        path, revision = self.path, self.revision
        if self.form is None:
            model = read_model(path, revision, self.dtype)
        elif for_peft:
            model = self.form.read_by_library(path, revision, self.dtype, self.device)
        else:
            model = self.form.read(path, revision, self.dtype, self.device)
        model.eval()
        if not for_peft or self.form is None:  # codes of a library stay where they were made
            model.to(self.device)
        if getattr(model, "_supports_sdpa", False):  # generation keeps a cache and does not pack
            model.set_attn_implementation("sdpa")
        return model


def load_speakers(
    folders: Sequence[Path], base_model: str | None, dtype: str, device: str, images: Sequence[str] = ()
) -> Speakers:
    """Load the base model once, and put the adapters on it.

    Args:
        folders: finished adapters or checkpoints of one base model.
        base_model: where to load the base from; default is what the adapters name.
        dtype: auto is that of the run that trained the first adapter, else the base's.
        images: paths that will be asked about; looked at before the weights are read.

    Raises:
        InputError: an adapter, the base or an image cannot be used, or the adapters name several bases.
    """
    found = BaseOf.of(folders, base_model, dtype, device)
    with of_the_base():
        tokenizer = read_tokenizer(found.path, found.revision)
    seeing = AskedImages(found.path, found.revision, found.config)
    for image in images:
        seeing.look(image, "--image", tokenizer)
    with of_the_base():
        model = found.load()
    if (own := _probed(model)) is not None:
        prepare_model(model, False)
    names = _names(folders)
    specs = {name: resolve_folder(folder, model, name) for name, folder in names.items()}
    attached, adapters = attach(model, specs, 0)
    for adapter in adapters:
        load_adapter(names[adapter.name], adapter)
        if note := unused_note(names[adapter.name], tokenizer):
            say(note)
        told = found.trained_on[names[adapter.name]]
        if told is not None and (found.form is None or told.get("method") != found.form.method):
            say(
                f"{adapter.name} was trained on a base model in {quoted(told.get('method'))}, and answers here on the base's "
                "own weights; packlora merge folds it into what the codes stand for"
            )
    context = context_of(found.config)
    templates = {name: text for name, folder in names.items() if (text := own_template(folder)) is not None}
    known = [tokenizer, *(templated(tokenizer, text) for text in templates.values())]
    ends = sorted({end for one in known for end in answer_ends(one, model)})
    by_name = {adapter.name: adapter for adapter in adapters}
    settings = model.generation_config
    seen_by = LibrarySampler(model, attached, tokenizer, context, settings)
    sampler: Sampler | LibrarySampler = seen_by
    if own is not None:
        sampler, _ = sampler_for(model, attached, tokenizer, own, settings, context=context, fewest_rows=1)
    data = {name: trained.job.data for name, folder in names.items() if (trained := trained_by(folder)) is not None}
    return Speakers(model, tokenizer, by_name, context, ends, seeing, sampler, seen_by, templates, data)


def _probed(model: Any) -> torch.Tensor | None:
    """Logits that show whether the model can be sampled from a cache of keys and values; None where it cannot."""
    if settings_that_change(model.generation_config) or other_cache(model):
        return None
    try:
        return own_probe(model)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return None  # what it needs beside tokens, or what it lacks, is said where it answers


def _names(folders: Sequence[Path]) -> dict[str, Path]:
    """Last parts of paths where these differ from one another, else the paths."""
    short = [Path(os.path.abspath(folder)).name for folder in folders]
    named = [
        str(folder) if short.count(name) > 1 or name == BASE else name
        for folder, name in zip(folders, short, strict=True)
    ]
    if twice := next((name for name in named if named.count(name) > 1), None):
        raise InputError(f"{twice} is given twice")
    return dict(zip(named, folders, strict=True))


def generate(
    folder: Path, prompt: str, system: str | None, raw: bool, how: Sampling,
    base_model: str | None = None, dtype: str = "auto", device: str = "auto", images: Sequence[str] = (),
) -> str:  # fmt: skip
    """The answer of one adapter.

    Args:
        system: a message of the system before the prompt.
        raw: the prompt is continued as plain text.
        images: paths of images, which stand before the prompt.
    """
    if raw and images:
        raise InputError("--image: an image goes by the chat template, and --raw goes on from plain text")
    speakers = load_speakers([folder], base_model, dtype, device, images)
    return speakers.answers(speakers.asked([prompt], system, raw, how, images))[0]


@dataclass(slots=True)
class Talk:
    """A conversation with one adapter. images: paths of those in `messages`, in their order."""

    system: str | None
    raw: bool
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)

    def asked(self, text: str, images: Sequence[str]) -> str | list[dict[str, Any]]:
        """Conversation with one more turn of the user."""
        if self.raw:
            if self.system is not None:
                raise InputError("a system message goes by the chat template, and the prompt is plain text here")
            if images:
                raise InputError("an image goes by the chat template, and the prompt is plain text here")
            return text
        start = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*start, *self.messages, _turn(text, images)]

    def goes_on(self, text: str, images: Sequence[str], answer: str) -> None:
        self.messages += [_turn(text, images), {"role": "assistant", "content": answer}]
        self.images += images


def _typed() -> Iterator[str]:
    """Lines of a person at a terminal, where there is readline with its keys for editing and earlier lines."""
    if obeys(sys.stdout):  # readline sends escape sequences
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")
    while True:
        try:
            yield input("> ")
        except EOFError:
            show("")
            return


def _turn(text: str, images: Sequence[str]) -> dict[str, Any]:
    blocks: list[dict[str, str]] = [{"type": "image"} for _ in images]
    return {"role": "user", "content": [*blocks, {"type": "text", "text": text}] if blocks else text}


def chat(
    folders: Sequence[Path], with_base: bool, system: str | None, how: Sampling,
    base_model: str | None = None, dtype: str = "auto", device: str = "auto", lines: Iterable[str] | None = None,
    images: Sequence[str] = (),
) -> None:  # fmt: skip
    """Chat on standard input and output: every line is a turn, which each adapter answers in a conversation of its own; where
    there are several, each answer follows the adapter's name. Lines that begin with / are commands, see COMMANDS.

    Args:
        with_base: the base model answers too, first.
        lines: standard input where none are given.
        images: paths of images that go with the first turn.
    """
    speakers = load_speakers(folders, base_model, dtype, device, images)
    names = [BASE] * with_base + list(speakers.adapters)
    raw = {name: not speakers.tokenizer_of(name).chat_template for name in names}
    conversation = Conversation(speakers, how, raw)
    if any(raw.values()) and images:
        Talk(system, True).asked("a", images)
    conversation.begin(system)  # errors of the template come before the first input
    conversation.seen = list(images)
    speakers.note_systems(system)
    if without := [name for name in names if raw[name]]:
        say(
            f"{', '.join(without)}: the tokenizer has no chat template: each line is continued as plain text, by itself"
        )
    terminal = lines is None and sys.stdin.isatty()
    if terminal:
        say(f"{', '.join(names)} answer; {HELP} shows what can be typed beside text")
    typed = _typed() if terminal and sys.stdout.isatty() else sys.stdin
    for line in lines if lines is not None else typed:
        if not conversation.take(line.rstrip("\r\n")):
            return


@dataclass(slots=True)
class Conversation:
    """The same turns said to several adapters. raw: by name, whether lines are continued as plain text. seen: paths of images
    that go with the next turn."""

    speakers: Speakers
    how: Sampling
    raw: Mapping[str, bool]
    system: str | None = None
    talks: dict[str, Talk] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)

    def begin(self, system: str | None) -> None:
        """Begin anew. Raises InputError where the model takes no message of the system."""
        if system is not None:
            for name, raw in self.raw.items():
                asked, variables = Talk(system, raw).asked("a", ()), self.speakers.variables_of(name)
                prompt_ids(asked, self.speakers.tokenizer_of(name), variables=variables)
        self.system, self.seen = system, []
        self.talks = {name: Talk(system, raw) for name, raw in self.raw.items()}

    def take(self, text: str) -> bool:
        """Answer a line, or do what it commands; False: it ends the conversation."""
        first, more = [*text.split(maxsplit=1), "", ""][:2]
        if text.strip() == EXIT:
            return False
        if text.strip() == HELP:
            self._help()
        elif text.strip() == RESET:
            self.begin(self.system)
        elif first == SYSTEM:
            try:
                self.begin(more.strip() or None)
            except InputError as error:
                say(f"{SYSTEM}: {error}")
        elif first == IMAGE:
            self.seen += self.speakers.images.named(more.strip(), IMAGE, self.speakers.tokenizer)
        elif first:
            self._answer(text)
        return True

    def _help(self) -> None:
        known = COMMANDS | (OF_IMAGES if self.speakers.images.there else {})
        for command, what in known.items():
            say(f"{command} {what}")

    def _answer(self, text: str) -> None:
        out, questions = standard_output(), {}
        for name in self.raw:
            talk = self.talks[name]
            try:
                paths = [*talk.images, *self.seen]
                questions[name] = self.speakers.question(name, talk.asked(text, self.seen), self.how, paths)
            except InputError as error:
                say(f"{name}: {error}; {RESET} begins anew")
        for name, answer in zip(questions, self.speakers.answers([*questions.values()]), strict=True):
            self.talks[name].goes_on(text, self.seen, answer)
            out.write(on(out, (f"{name}: " if len(self.raw) > 1 else "") + answer) + "\n")
        out.flush()
        self.seen = []
