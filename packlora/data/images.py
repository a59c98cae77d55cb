"""Images of rows: which forms they are written in, which files they are, and what of a file is refused before it is decoded.

    {"type": "image", "path": "a.png"}         a block of a message's content; `image` or `url` in the place of `path`
    "images": ["a.png"]                        of the whole row, in the order of the blocks {"type": "image"} or of the marks
                                               <image> in texts; where there are none, all stand before the first user's text
    "image": "a.png"                           the same of one

A relative path is one inside of the folder of the data file. Files are checked before training, one at a time, and decoded
again when their microbatch is due: no more than its images are in memory. What an image becomes in a model is base/vision.py's.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from PIL import Image as pillow
from PIL import ImageOps, UnidentifiedImageError

from packlora.errors import InputError, quoted

MARK = "<image>"
"""Stands for an image in a text of a row that has images."""
PATHS = ("path", "image", "url")
"""Keys of a block under which other tools have an image's path."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""That are read; some others run programs."""
MOST_PIXELS = 2**26
"""Of an image, 8192 by 8192: what is decoded takes three bytes for each."""
MOST_BYTES = 2**28
"""Of a file."""
MOST_RATIO = 200
"""Of the longer side to the shorter one, as Qwen's processor has it. Others enlarge the shorter side to hundreds of pixels: of
60000 by 1 they would make 20 GB."""

Bad = Callable[[str], InputError]


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file that was decoded once. digest: of its bytes; whoever decodes it again finds the same or an error."""

    path: str
    digest: bytes

    def decode(self) -> pillow.Image:
        """RGB, upright. Raises InputError where the file is no longer what it was."""
        digest, image = decode(self.path)
        if digest != self.digest:
            raise InputError(f"the image {self.path} has changed since the run began")
        return image


@dataclass(frozen=True, slots=True)
class Images:
    """Of a sample. counts: tokens of each of the files, all of which are `token_id`."""

    files: tuple[ImageFile, ...]
    counts: tuple[int, ...]
    token_id: int

    @staticmethod
    def joined(parts: Sequence[Images | None]) -> Images | None:
        """Of the parts of a sample, one behind the other."""
        own = [part for part in parts if part is not None]
        if not own:
            return None
        files, counts = (tuple(one for part in own for one in getattr(part, name)) for name in ("files", "counts"))
        return Images(files, counts, own[0].token_id)

    def cut(self, ids: np.ndarray, limit: int) -> tuple[int, Images | None]:
        """Tokens that are left of `ids` [T] where at most `limit` are, with no image cut through; and the images of these."""
        places = np.flatnonzero(ids == self.token_id)
        ends = np.cumsum(self.counts)
        kept = sum(int(places[end - 1]) < limit for end in ends)
        if kept < len(self.files):
            limit = min(limit, int(places[ends[kept] - self.counts[kept]]))
        return limit, Images(self.files[:kept], self.counts[:kept], self.token_id) if kept else None


class ImageText(Protocol):
    """What data needs of a model that sees images; base/vision.py, `Vision`."""

    image_mark: str
    """What the chat template writes for an image."""
    token_id: int
    """Of every token in whose place the model puts a part of an image."""

    def text_of(self, image: pillow.Image) -> str:
        """What stands in the place of `image_mark`. Raises ValueError where the image is none for this model."""

    def count(self, text: str) -> int:
        """Tokens of images in it."""


@dataclass(slots=True)
class Shown:
    """Images as a model's texts have them; each file is looked at once."""

    vision: ImageText
    _known: dict[tuple[Any, ...], tuple[ImageFile, str]] = field(default_factory=dict)

    def put_in(
        self, text: str, spans: list[tuple[int, int]], paths: Sequence[str], where: str
    ) -> tuple[str, list[tuple[int, int]], Images]:
        """A text with what stands for each image in the place of its mark, the spans that were given in it, and the images.

        Raises:
            InputError: there are not as many marks as images, or a file is no image for this model.
        """
        found = list(re.finditer(re.escape(self.vision.image_mark), text))
        if len(found) != len(paths):
            raise InputError(
                f"{where}: the chat template shows {len(found)} images ({self.vision.image_mark}), and {len(paths)} are given; "
                "it is not for images, or the mark stands in a text as well"
            )
        shown = [self.look(path, where) for path in paths]
        parts, last = [], 0
        for match, (_, replacement) in zip(found, shown, strict=True):
            parts += [text[last : match.start()], replacement]
            last = match.end()

        def moved(place: int) -> int:
            grown = (
                len(new) - len(match[0]) for match, (_, new) in zip(found, shown, strict=True) if match.end() <= place
            )
            return place + sum(grown)

        counts = tuple(self.vision.count(replacement) for _, replacement in shown)
        images = Images(tuple(file for file, _ in shown), counts, self.vision.token_id)
        return "".join([*parts, text[last:]]), [(moved(start), moved(end)) for start, end in spans], images

    def problem_of(self, ids: np.ndarray, images: Images | None) -> str | None:
        """What is wrong with the tokens [T] of a sample: those of images must be of its images."""
        found, wanted = int((ids == self.vision.token_id).sum()), sum(images.counts) if images is not None else 0
        if found == wanted:
            return None
        return f"the sample has {found} tokens of images, its images have {wanted}; the token stands in a text as well"

    def look(self, path: str, where: str) -> tuple[ImageFile, str]:
        """A file, and what stands for it in a text. Raises InputError where it is no image for this model."""
        try:
            found = os.stat(path)
            key = path, found.st_mtime_ns, found.st_size
            if key not in self._known:
                digest, image = decode(path)
                self._known[key] = ImageFile(path, digest), self.vision.text_of(image)
            return self._known[key]
        except FileNotFoundError:
            raise InputError(f"{where}: the image {path} does not exist") from None
        except OSError as error:
            raise InputError(f"{where}: cannot read the image {path}: {error.strerror or error}") from None
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        except ValueError as error:
            raise InputError(f"{where}: the image {path} is none for this model: {error}") from None


def decode(path: str) -> tuple[bytes, pillow.Image]:
    """The digest of a file's bytes, and the image in it: RGB, upright, of an animation the first frame.

    Raises:
        OSError: it cannot be read.
        InputError: it is no image, is broken, or is too large.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise InputError(f"the image {path} is no file")
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_size > MOST_BYTES:
            raise InputError(f"the image {path} has {found.st_size} bytes, more than {MOST_BYTES}; make it smaller")
        data = file.read()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = pillow.open(
                io.BytesIO(data), formats=FORMATS
            )  # refuses what its own limit, 2.7 times MOST_PIXELS, does
            if image.width * image.height > MOST_PIXELS:
                raise pillow.DecompressionBombError(f"{image.width} x {image.height} pixels")
            if max(image.size) > MOST_RATIO * min(image.size):
                raise ValueError(
                    f"it is {image.width} x {image.height}, and a side is at most {MOST_RATIO} times the other"
                )
            image.load()
            if (wide := _wider(image)) is not None:
                raise ValueError(wide)
            upright = (ImageOps.exif_transpose(image) or image).convert("RGB")
    except (pillow.DecompressionBombError, MemoryError) as error:
        raise InputError(
            f"the image {path} is too large, at most {MOST_PIXELS} pixels are read ({error}); make it smaller"
        ) from None
    except UnidentifiedImageError:
        raise InputError(f"the image {path} cannot be decoded; formats are {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders of damaged files raise many types
        formats = ", ".join(FORMATS)
        raise InputError(f"the image {path} cannot be decoded ({error}); formats are {formats}") from None
    return hashlib.blake2b(data, digest_size=16).digest(), upright


def _wider(image: pillow.Image) -> str | None:
    """What an image has that three colours of 8 bits do not: Pillow would make all of it white, or black, without a word."""
    if image.mode != "F" and not image.mode.startswith("I"):
        return None
    low, high = image.getextrema()
    if image.mode != "F" and low >= 0 and high <= 255:  # type: ignore[operator]
        return None
    return f"it has grey values from {low:g} to {high:g} in mode {image.mode}; save it with 8 bits"


# --- how rows have them ------------------------------------------------------------------------------------------------


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
        value = value["path"]  # as the data sets library stores them
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
    """All images before the text of the first message of a user."""
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
