"""Images of rows: which files they are, and what of a file is refused before it is decoded; which forms rows have them in:
rows.py.

Files are checked before training, one at a time, and decoded
again when their microbatch is due: no more than its images are in memory. What an image becomes in a model is vision.py's.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from PIL import Image as pillow
from PIL import ImageOps, UnidentifiedImageError

from packlora.errors import InputError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Image formats that are read; reading some others would start external programs."""
MOST_PIXELS = 2**26
"""Pixels of the largest image, 8192 by 8192: a decoded image takes three bytes for each."""
MOST_BYTES = 2**28
"""Bytes of the largest image file."""
MOST_RATIO = 200
"""Largest ratio of the longer side to the shorter one, as in Qwen's processor. Other processors enlarge the shorter side to
hundreds of pixels: they would make 20 GB of an image of 60000 by 1."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """Image file that was decoded once. digest: hash of its bytes; decoding it again gives the same image or an error."""

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
    """Images of a sample. counts: number of tokens of each file; all of these are `token_id`. See modality.py, Extras."""

    files: tuple[ImageFile, ...]
    counts: tuple[int, ...]
    token_id: int
    kind: ClassVar[str] = "images"

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def digest(self) -> bytes:
        return b"".join(file.digest for file in self.files)

    def joined(self, others: Sequence[Images]) -> Images:
        """Concatenate these images and those of the other parts of the sample."""
        own = [self, *others]
        files, counts = (tuple(one for part in own for one in getattr(part, name)) for name in ("files", "counts"))
        return Images(files, counts, self.token_id)

    def split(self, parts: Sequence[np.ndarray]) -> list[Images | None]:
        """The images of each part of the sample, by its token ids [T]."""
        out, first, stop = list[Images | None](), 0, 0
        for ids in parts:
            tokens = int((ids == self.token_id).sum())
            while sum(self.counts[first:stop]) < tokens:
                stop += 1
            out.append(Images(self.files[first:stop], self.counts[first:stop], self.token_id) if tokens else None)
            first = stop
        return out

    def cut(self, ids: np.ndarray, limit: int) -> tuple[int, Images | None]:
        """Tokens that are left of `ids` [T] where at most `limit` are, with no image cut through; and the images of these."""
        places = np.flatnonzero(ids == self.token_id)
        ends = np.cumsum(self.counts)
        kept = sum(int(places[end - 1]) < limit for end in ends)
        if kept < len(self.files):
            limit = min(limit, int(places[ends[kept] - self.counts[kept]]))
        return limit, Images(self.files[:kept], self.counts[:kept], self.token_id) if kept else None


class ImageText(Protocol):
    """Interface of a vision-language model to the data; vision.py implements it as `Vision`."""

    image_mark: str
    """Text that the chat template writes for an image."""
    token_id: int
    """Token that the model replaces by a part of an image."""

    def text_of(self, image: pillow.Image) -> str:
        """Text that replaces `image_mark`. Raises ValueError where the model cannot take the image."""

    def count(self, text: str) -> int:
        """Tokens of images in it."""


@dataclass(slots=True)
class Shown:
    """Images as a model's texts have them; each file is looked at once. See modality.py, ExtrasReader."""

    vision: ImageText
    _known: dict[tuple[Any, ...], tuple[ImageFile, str]] = field(default_factory=dict)

    def put_in(
        self, text: str, spans: list[tuple[int, int]], paths: Sequence[str], where: str
    ) -> tuple[str, list[tuple[int, int]], Images]:
        """Replace the image marks in a text by the images' tokens; return the text, the spans shifted accordingly, and the
        images.

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
        """Error in the tokens [T] of a sample, or None: the number of image tokens must be that of its images."""
        found, wanted = int((ids == self.vision.token_id).sum()), images.num_tokens if images is not None else 0
        if found == wanted:
            return None
        return f"the sample has {found} tokens of images, its images have {wanted}; the token stands in a text as well"

    def look(self, path: str, where: str) -> tuple[ImageFile, str]:
        """Decode a file, and return it with the text of its tokens. Raises InputError where it is no image for this model."""
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
    """Describe the pixel values of an image that do not fit into three colours of 8 bits, or None: Pillow would silently make
    all of it white, or black."""
    if image.mode != "F" and not image.mode.startswith("I"):
        return None
    low, high = image.getextrema()
    if image.mode != "F" and low >= 0 and high <= 255:  # type: ignore[operator]
        return None
    return f"it has grey values from {low:g} to {high:g} in mode {image.mode}; save it with 8 bits"
