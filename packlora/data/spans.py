"""Learnt spans of a conversation: the characters that the model would generate itself, for any chat template.

Every part of every message is found by marks (places.py). Consecutive parts of one message form a span; a part of another role
ends the span, so a tool's result inside the model's turn is not learnt. A span begins after the text that the template writes
as the generation prompt. It ends after the text that the template writes after the turn whatever comes next. Both ends are
found by comparing the text behind a part with renderings of the conversation up to there (windows.py). Where the template
writes nothing after a turn, the model stops with the first token of the next header, so that token is learnt as the end.

A template with `{% generation %}` marks the learnt spans itself.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from packlora.data.marks import Marker, Message, Place, forms, tags_of
from packlora.data.places import NotShownError, Placed, check_calls, check_shown, check_tools, names_of, placed
from packlora.data.template import EndlessTemplateError, Spans, Template
from packlora.data.windows import A_USER, KNOWN, Windows, attempt, tail
from packlora.errors import InputError

UNIT = re.compile(r"<[^<>\s]{1,40}>|\w+|.", re.DOTALL)
"""Units by which texts are compared: tags, words, letters."""
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
CHECKS = 4
"""Windows of a conversation that are compared with all that is before, where one does not agree with the text to its end."""
FORGOTTEN = "have earlier thoughts that the chat template leaves out, so they are not learnt"
EMPTY = "have empty answers, which are not learnt"
UNENDED = "have answers that the chat template does not end, so that their end is not learnt"
UNMASKED = "have parts or ends of answers that the chat template's {% generation %} leaves out, so they are not learnt"


@dataclass(frozen=True, slots=True)
class Learnt:
    """A conversation's text, the spans of its characters that are learnt, in order, and what should be known of it.

    notes: what is so, and the name of the first message of which it is.
    """

    text: str
    spans: Spans
    notes: dict[str, str] = field(default_factory=dict)


def learn(template: Template, messages: Sequence[Message], names: Sequence[str] = ()) -> Learnt:
    """Learnt spans of a conversation: the assistant's turns, except those of weight 0.

    Args:
        names: of the messages, for what is said of them.

    Raises:
        InputError: the template refuses the conversation, does not show all of it, or it cannot be told what is learnt.
    """
    names = names or names_of(messages)
    turns = {n for n, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight") != 0}
    first: InputError | None = None
    for form in forms(list(messages), list(names)):
        try:
            check_tools(template, form)
            return _learn(placed(template, form, names), turns)
        except EndlessTemplateError:
            raise
        except InputError as error:  # an error about a part that is not shown says more than one about the template
            first = error if first is None or isinstance(error, NotShownError) else first
    assert first is not None
    raise first


def _learn(found: Placed, turns: set[int]) -> Learnt:
    forgotten = check_shown(found, turns)
    check_calls(found)
    notes = {FORGOTTEN: found.names[min(forgotten)]} if forgotten else {}
    if empty := turns - {part.message for part in found.parts}:
        notes[EMPTY] = found.names[min(empty)]
    if _has_mask(found.template.source):
        masked = _masked(found, turns)
        if masked is not None:
            left = _left_out(found, turns, masked)
            return Learnt(found.text, masked, notes | ({} if left is None else {UNMASKED: found.names[left]}))
    own = _Turns(found, turns)
    spans = own.spans()
    if own.unended:
        notes[UNENDED] = found.names[own.unended[0]]
    return Learnt(own.text, spans, notes)


@lru_cache
def _has_mask(source: str) -> bool:
    return GENERATION.search(COMMENT.sub("", source)) is not None


def _masked(found: Placed, turns: set[int]) -> Spans | None:
    """Spans that the template marks itself, without the turns that are not learnt; None where it marks text of another role, or
    turns that are learnt and turns that are not as one."""
    text, spans = found.template.masked(found.messages)
    groups = [(group[0].start, group[-1].stop, group[0].part.message) for group in found.in_order()]
    out = []
    for start, stop in spans:
        own = {message for first, last, message in groups if first < stop and start < last}
        if any(found.messages[message]["role"] != "assistant" for message in own) or (own & turns and own - turns):
            return None
        if not own or own & turns:
            out.append((start, stop))
    return out if text == found.text else None


def _left_out(found: Placed, turns: set[int], masked: Spans) -> int | None:
    """The first turn with a part, or an end behind its last part, that the template does not mark; None: there is none."""
    places = [place for group in found.in_order() for place in group if place.part.message in turns]
    last = {place.part.message: place.stop for place in places}
    is_marked = bytearray(len(found.text) + 1)
    for start, stop in masked:
        is_marked[start:stop] = bytes([1]) * (stop - start)
    for place in places:
        if not all(is_marked[place.start : place.stop + (last[place.part.message] == place.stop)]):
            return place.part.message
    return None


def common(a: str, b: str) -> str:
    """Longest common beginning of two texts, in units."""
    if a.startswith(b):
        return b
    size = 0
    for left, right in zip(UNIT.finditer(a), UNIT.finditer(b), strict=False):
        if left[0] != right[0]:
            break
        size = left.end()
    return a[:size]


def common_end(a: str, b: str) -> str:
    """Longest common end of two texts, in units."""
    size = 0
    for left, right in zip(reversed(UNIT.findall(a)), reversed(UNIT.findall(b)), strict=False):
        if left != right:
            break
        size += len(left)
    return a[len(a) - size :]


@dataclass(frozen=True, slots=True)
class _Around:
    """Text that a template writes around any answer.

    header: text that opens an answer. written: what of it stands before an answer that is there, too. always: text that the
    template writes at the end of any rendering, for a next answer that was not requested. is_ended: whether some text ends an
    answer.
    """

    header: str
    written: str
    always: str
    is_ended: bool

    @staticmethod
    def of(windows: Windows, eos: str) -> _Around:
        """Find what the template of the windows writes around answers; all conversations with it share one finding."""
        key = *windows.key, eos
        if key not in _AROUND:
            if len(_AROUND) >= KNOWN:
                _AROUND.clear()
            _AROUND[key] = _Around._found(windows, eos)
        return _AROUND[key]

    @staticmethod
    def _found(windows: Windows, eos: str) -> _Around:
        asked, opened = (windows.behind_a_user(generation) or "" for generation in (False, True))
        end, always = windows.behind_an_answer(), ""
        between, before = windows.behind_an_answer(A_USER), windows.before_an_answer()
        if asked.strip() and not between.startswith(end.rstrip()):
            own = between.removesuffix(common_end(between, windows.before_a_user()))
            always = end.removeprefix(own) if own.strip() and end.startswith(own) else common_end(end, asked)
            always = always.rpartition(eos)[2] if eos and eos in before else always  # which ends a user's turn, too
            always = always if asked == opened or always in before else ""
        start = len(common(opened, asked))
        written = common(before, opened)[start:]
        return _Around(opened[start:], written, always, bool(end.removesuffix(always).strip()))


_AROUND: dict[tuple[Any, ...], _Around] = {}


class _Turns:
    """The turns of one conversation.

    Attributes:
        text: with the token that ends the last turn, if the template writes none.
        unended: the numbers of the messages that nothing ends.
    """

    def __init__(self, found: Placed, turns: set[int]) -> None:
        self.found, self.turns, self.text, self.windows = found, turns, found.text, found.windows
        self._marked = {part.message for part in found.parts}
        self.groups = [part for group in found.in_order() for part in self._without_results(group)]
        self.owners = [group[0].part.message for group in self.groups]
        self.unended: list[int] = []
        self.around = _Around.of(self.windows, found.template.tokenizer.eos_token or "")
        self._checks, self._is_local = 0, True

    def spans(self) -> Spans:
        seen, out = set[int](), []
        for number, owner in enumerate(self.owners):
            if owner in self.turns:
                start = self.groups[number][0].start if owner in seen else self._begin(number)
                out.append((start, self._end(number)))
            seen.add(owner)
        return out

    def _without_results(self, group: list[Place]) -> list[list[Place]]:
        """Split a group where an empty result of a tool lies inside it. Such a result has no mark; it is found by rendering the
        group without it."""
        owner, roles = group[0].part.message, self.windows.roles
        results = itertools.takewhile(lambda number: roles[number] == "tool", range(owner + 1, len(roles)))
        if owner not in self.turns or len(group) < 2 or self._marked.issuperset(results):
            return [group]
        out, near = [group[:1]], self.windows.near(owner + 1, owner)
        for before, place in itertools.pairwise(group):
            alone = self.windows.behind(near, before, False, up_to_next=True)
            if alone is not None and self.text[before.stop : place.start] != alone:
                out.append([])
            out[-1].append(place)
        return out

    # --- where a turn begins ---

    def _begin(self, number: int) -> int:
        """Place where the model begins to generate: after the text that the template writes before the turn."""
        owner, first = self.owners[number], self.groups[number][0].start
        floor = self.groups[number - 1][-1].stop if number else 0
        gap, header = self.text[floor:first], self.around.header
        prompt = self._prompt(number, gap)
        lead = common(gap, prompt) if prompt is not None else ""
        if number and prompt and lead != prompt:
            lead = max(lead, common(gap, self._prompt_in_words(number)), key=len)
        is_strange = prompt is None or bool(prompt and not lead)
        again = (part for part in (header, self.around.written) if part.strip() and part in gap[len(lead) :])
        cut = header if is_strange else next(again, "")
        while cut and cut not in gap:  # the model does not write the header, or what its turn shares with it
            cut = cut[: [unit.start() for unit in UNIT.finditer(cut)][-1]]
        if cut:
            lead = gap[: gap.rfind(cut) + len(cut)]
        elif gap.strip() and is_strange and not (number and self.owners[number - 1] in self.turns):
            raise self._lost(owner, "begins")
        return floor + len(lead)

    def _prompt(self, number: int, gap: str) -> str | None:
        """Generation prompt that the template writes between the part before a turn and the turn."""
        owner = self.owners[number]
        if not number:
            return self.windows.rendered(range(owner), True, exact=True) if owner else None
        before = self.groups[number - 1][-1]
        near = self.windows.near(owner, before.part.message)
        return self._agreed(owner, near, before, gap, generation=True)

    def _prompt_in_words(self, number: int) -> str:
        """Generation prompt as in `_prompt`, rendered from the messages with their real words: a template may repeat some words
        there, such as a call's name above its result."""
        owner, before = self.owners[number], self.groups[number - 1][-1]
        near = [self.found.marked[other] for other in self.windows.near(owner, before.part.message)]
        return tail(attempt(self.found.template, near, True), before.part.last, before.number) or ""

    def _agreed(
        self, stop: int, near: Sequence[int], place: Place, gap: str, generation: bool, up_to_next: bool = False
    ) -> str | None:
        """Text that follows a part, seen in a window.

        A window that the text does not go on with to its end is compared with all that is before, a few times. If they
        differ, the template remembers what is far, and windows are no longer taken.
        """
        text = self.windows.behind(near, place, generation, up_to_next)
        if text is not None and gap.startswith(text.rstrip()) and (text.strip() or not gap.strip()):
            return text
        if self._is_local and self._checks >= CHECKS and text is not None:
            return text
        whole = self.windows.behind(range(stop), place, generation, up_to_next, exact=True)
        self._checks += 1
        self._is_local &= whole == text
        return whole

    # --- where a turn ends ---

    def _end(self, number: int) -> int:
        """Place where the model stops: after the text that the template writes after a turn, whatever comes next."""
        owner, last = self.owners[number], self.groups[number][-1].stop
        is_last_part, is_last = number + 1 == len(self.groups), owner + 1 == len(self.found.messages)
        following = None if is_last_part else self.owners[number + 1]
        gap = self.text[last : len(self.text) if is_last_part else self.groups[number + 1][0].start]
        end = gap if is_last and is_last_part else self._ended(number, gap, following)
        end = end.removesuffix(self.around.always).rstrip()
        is_ended = self.around.is_ended and end
        if not is_ended and following != owner and (gap or is_last):
            end += self._stop(number, gap, end, is_last)
        return last + len(end)

    def _ended(self, number: int, gap: str, following: int | None) -> str:
        """Text after a turn that is the same here and where nothing comes next, or where another turn of the model does."""
        owner, place, header = self.owners[number], self.groups[number][-1], self.around.header
        here, more = (self._behind(owner, place, gap, generation) for generation in (False, True))
        if here is None and more is None:
            raise self._lost(owner, "ends")
        ends = ["", common(gap, here or "")]
        if more and header and more.endswith(header):
            ends.append(common(gap, more[: -len(header)].removesuffix(self.around.always)))
        goes_on = following == owner + 1 and self.found.messages[following]["role"] == "assistant"
        if header and goes_on and header in gap:
            ends.append(gap[: gap.rfind(header)])
        return max(ends, key=len)

    def _behind(self, owner: int, place: Place, gap: str, generation: bool) -> str | None:
        """Text after a turn that is the last one; the window gets a user's message before it where the template requires
        one."""
        near = self.windows.near(owner + 1, owner)
        text = self._agreed(owner + 1, near, place, gap, generation, up_to_next=True)
        for numbers in ([*range(owner), A_USER, owner], [A_USER, owner]) if text is None else ():
            text = self.windows.behind(numbers, place, generation, up_to_next=True)
            if text is not None:
                break
        return text.removesuffix(self.around.always) if text is not None else None

    def _stop(self, number: int, gap: str, end: str, is_last: bool) -> str:
        """The token with which the next header begins, where nothing else ends a turn."""
        owner, last = self.owners[number], self.groups[number][-1].stop
        token = _token_of(self.found.template)
        if is_last and last + len(end) >= len(self.text.rstrip()):
            header = self._next_header(number)
            if header is None:  # a thought that is left out before another message
                header = end + self.windows.behind_an_answer(A_USER)
            stop = token.match(header, len(end))
            self.text = self.text[: last + len(end)] + (stop[0] if stop else "")
        else:
            stop, header = token.match(gap, len(end)), self.around.header.strip()
            if header and gap[len(end) :].lstrip().startswith(header):
                stop = None  # the model goes on
        if stop is None:
            self.unended.append(owner)
            return ""
        return stop[0]

    def _next_header(self, number: int) -> str | None:
        """Header that would follow the last turn if another message came next."""
        messages, place = self.found.messages, self.groups[number][-1]
        role = "tool" if messages[-1].get("tool_calls") else "user"
        marker = Marker(len(messages), tags_of(self.found.template.source))
        following = marker.message({"role": role, "content": "m", "name": "m"})
        return tail(attempt(self.found.template, [*self.found.marked, following]), place.part.last, place.number)

    def _lost(self, owner: int, what: str) -> InputError:
        return InputError(
            f"{self.found.names[owner]}: where it {what} cannot be told from what the chat template writes"
        )


def _token_of(template: Template) -> re.Pattern[str]:
    """Matches a token of the tokenizer's own, with white space before it."""
    tokens = {*template.tokenizer.get_added_vocab(), *template.tokenizer.all_special_tokens}
    return re.compile(r"\s*(?:" + ("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)") + ")")
