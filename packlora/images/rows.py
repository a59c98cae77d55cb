"""Images of rows: the forms that they are written in.

    {"type": "image", "path": "a.png"}         a block of a message's content; `image` or `url` in the place of `path`
    "images": ["a.png"]                        of the whole row, in the order of the blocks {"type": "image"} or of the marks
                                               <image> in texts; where there are none, all stand before the first user's text
    "image": "a.png"                           the same of one

A relative path is one inside of the folder of the data file. What is read of the files: files.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from packlora.data.messages import FLAGS, PARTS_LEARNT, WEIGHT
from packlora.errors import InputError, quoted

MARK = "<image>"
"""Stands for an image in a text of a row that has images."""
PATHS = ("path", "image", "url")
"""Keys of a block under which other tools have an image's path."""

Bad = Callable[[str], InputError]


def with_images(value: dict[str, Any], folder: str | None, bad: Bad) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A row whose images are blocks {"type": "image"} of its messages, and the paths of the images, in their order.

    Args:
        value: a row of messages, or of a prompt and a completion.
        folder: of the data file; None where it has none.
        bad: makes the error of a problem.
    """
    listed = _listed(value, bad)
    if listed and value.get("messages") is None:
        if not isinstance(value.get("prompt"), str):
            raise bad("'images' go with messages, or with a prompt and its completion")
        turns = [{"role": "user", "content": value["prompt"]}, {"role": "assistant", "content": value["completion"]}]
        value = {key: own for key, own in value.items() if key not in ("prompt", "completion")} | {"messages": turns}
    messages = value.get("messages")
    if not isinstance(messages, list):
        return value, ()
    found: list[str | None] = []
    read = [_message(message, number, bool(listed), found, bad) for number, message in enumerate(messages, 1)]
    if listed and not found:
        read, found = _before_text(read, len(listed), bad), [None] * len(listed)
    if not found:
        return value | {"messages": read}, ()
    given = [path for path in found if path is not None]
    if len(given) not in (0, len(found)) or (given and listed) or (not given and len(listed) != len(found)):
        raise bad(
            f"messages have {len(found)} places for images, {len(given)} of them with a path, and 'images' has {len(listed)} "
            "paths; each image has its path in one of both"
        )
    return value | {"messages": read}, tuple(_inside(path, folder, bad) for path in given or listed)


def _listed(value: dict[str, Any], bad: Bad) -> list[str]:
    """Paths of a row's `images` or `image`."""
    if value.get("images") is not None and value.get("image") is not None:
        raise bad("has both 'image' and 'images'")
    given = value["images"] if value.get("images") is not None else value.get("image")
    if given is None:
        return []
    return [_path(one, "'images'", bad) for one in (given if isinstance(given, list) else [given])]


def _path(value: Any, what: str, bad: Bad) -> str:
    if isinstance(value, dict) and isinstance(value.get("path"), str) and value.get("bytes") is None:
        value = value["path"]  # form of the datasets library
    if not isinstance(value, str) or not value:
        raise bad(f"{what} has {quoted(value)}; an image is given as the path of a file, not by its bytes")
    if "\0" in value or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", value):
        raise bad(f"{what} has {quoted(value)}; download the image and give the path of the copy")
    return value


def _message(message: Any, number: int, marked: bool, found: list[str | None], bad: Bad) -> Any:
    """A message whose content is a text, or blocks of texts and images.

    Args:
        marked: MARK in its texts is an image.
        found: takes an image's path, None where `images` has it.
    """
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str) and marked and MARK in content:
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return message
    out: list[dict[str, str]] = []
    before = len(found)
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        for key in (WEIGHT, *FLAGS) if kind is not None else ():
            if block.get(key) not in (None, message.get("role") == "assistant"):
                raise bad(f"message {number} has a block with the {key} {quoted(block[key])}; {PARTS_LEARNT}")
        if kind == "text" and isinstance(block.get("text"), str):
            for index, text in enumerate(block["text"].split(MARK) if marked else [block["text"]]):
                if index:
                    found.append(None)
                    out.append({"type": "image"})
                out += [{"type": "text", "text": text}] if text else []
        elif kind == "image":
            given = [block[key] for key in PATHS if block.get(key) is not None]
            if len(given) > 1 or any(block.get(key) is not None for key in ("base64", "data", "bytes")):
                raise bad(
                    f"message {number} has an image that is given by more or others than one of {', '.join(PATHS)}"
                )
            found.append(_path(given[0], f"message {number}", bad) if given else None)
            out.append({"type": "image"})
        else:
            raise bad(
                f"message {number} has the block {quoted(block)} in its content; known are {{type: text, text}} and "
                "{type: image, path}"
            )
    if len(found) == before:
        return message | {"content": "".join(block["text"] for block in out)}
    if message.get("role") == "assistant":
        raise bad(f"message {number} (assistant) has an image; a model reads images and writes text")
    return message | {"content": out}


def _before_text(messages: list[Any], number: int, bad: Bad) -> list[Any]:
    """Put all images before the text of the first message of a user."""
    for index, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user" and isinstance(message.get("content"), str):
            blocks = [{"type": "image"}] * number + [{"type": "text", "text": message["content"]}]
            return [*messages[:index], message | {"content": blocks}, *messages[index + 1 :]]
    raise bad("'images' stand before the text of a user, and no message is one")


def _inside(path: str, folder: str | None, bad: Bad) -> str:
    """The file that a path means."""
    if os.path.isabs(path):
        return path
    if folder is None:
        raise bad(f"the image {quoted(path)} is a relative path, which is looked up in the folder of a data file")
    root = os.path.realpath(folder)
    whole = os.path.realpath(os.path.join(root, path))
    if os.path.commonpath([root, whole]) != root:
        raise bad(f"the image {quoted(path)} lies outside of the data file's folder; give its absolute path")
    return whole
