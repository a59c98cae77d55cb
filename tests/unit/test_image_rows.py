"""Rows with images: the forms they are written in, which files they may name, and what is refused before training."""

from __future__ import annotations

import copy
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from PIL import Image as pillow
from PIL import PngImagePlugin
from transformers.image_utils import load_image

from packlora.config import DataConfig
from packlora.data.readers import read_data
from packlora.data.samples import encode_rows
from packlora.errors import InputError
from packlora.images.files import MOST_PIXELS, Images, Shown, decode

MARK = "<|im_start|>"
CHAT = (
    "{% for m in messages %}{{ m['role'] }}:{% for c in m['content'] %}{% if c['type'] == 'image' %}<|im_start|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Vision:
    """An image is as many tokens as it is wide."""

    image_mark, token_id = MARK, 4

    def text_of(self, image: pillow.Image) -> str:
        if image.width == 13:
            raise ValueError("thirteen")
        return MARK * image.width

    def count(self, text: str) -> int:
        return text.count(MARK)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    data.mkdir()
    for name, width in (("a", 2), ("b", 3)):
        pillow.fromarray(np.full((4, width, 3), 90, np.uint8)).save(data / f"{name}.png")
    pillow.new("RGB", (4, 4)).save(tmp_path / "outside.png")
    return data


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}, {"role": "assistant", "content": "the fox"}]


def encoded(
    folder: Path, *rows: Any, tokenizer: Any, shown: bool = True, context: int = 4096, trainer: str = "sft", **data: Any
) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=str(path), **data)
    read = read_data(str(path), "job", on_bad_row=config.on_bad_row)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHAT
    looking = Shown(Vision()) if shown else None
    given = (read.rows, tokenizer, config, 4096, "job", context)
    out = encode_rows(*given, reader=looking, trainer=trainer)
    out.skipped[:0] = read.skipped
    return out


TEXT = {"type": "text", "text": "the dog"}
FORMS: dict[str, Any] = {
    "blocks with paths": {
        "messages": user({"type": "image", "path": "a.png"}, {"type": "image", "url": "b.png"}, TEXT)
    },
    "blocks, and images of the row": {
        "messages": user({"type": "image"}, {"type": "image"}, TEXT), "images": ["a.png", "b.png"]
    },
    "marks in a text": {"messages": user(TEXT | {"text": "<image><image>the dog"}), "images": ["a.png", "b.png"]},
    "images before the first text": {
        "messages": [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "the fox"}],
        "images": [{"path": "a.png", "bytes": None}, "b.png"],
    },
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "<image><image>the dog"}, {"from": "gpt", "value": "the fox"}],
        "images": ["a.png", "b.png"],
    },
    "a prompt": {"prompt": "the dog", "completion": "the fox", "images": ["a.png", "b.png"]},
    "a conversation in two parts": {
        "prompt": user({"type": "image"}, {"type": "image"}, TEXT)[:1], "completion": user()[1:], "images": ["a.png", "b.png"]
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_sample(form: str, folder: Path, tokenizer: Any) -> None:
    (sample,) = encoded(folder, FORMS[form], tokenizer=tokenizer).samples
    text = f"user:{MARK * 5}the dog<|im_end|>assistant:the fox<|im_end|>"
    assert sample.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    learnt = tokenizer.decode(sample.ids[sample.is_label])
    assert learnt == "the fox<|im_end|>"
    assert [os.path.basename(file.path) for file in sample.extras.files] == ["a.png", "b.png"]
    assert sample.extras.counts == (2, 3)


PAIR: dict[str, Any] = {
    "prompt": "the dog",
    "chosen": "the fox",
    "rejected": "the fox the fox",
    "images": ["a.png", "b.png"],
}


def test_both_completions_of_a_pair_have_its_images(folder: Path, tokenizer: Any) -> None:
    blocks = user({"type": "image", "path": "a.png"}, {"type": "image", "path": "b.png"}, TEXT)
    turns = {"chosen": blocks[1:], "rejected": [blocks[1] | {"content": PAIR["rejected"]}]}
    forms = [PAIR, {"prompt": blocks[:1], **turns}, {name: blocks[:1] + turn for name, turn in turns.items()}]
    samples = encoded(folder, *forms, tokenizer=tokenizer, trainer="dpo").samples
    for sample in samples:
        assert [sample.ids.tolist(), sample.extras] == [samples[0].ids.tolist(), samples[0].extras]
        for part, text in zip(sample.parts(), (PAIR["chosen"], PAIR["rejected"]), strict=True):
            (own,) = encoded(folder, FORMS["a prompt"] | {"completion": text}, tokenizer=tokenizer).samples
            assert [part.ids.tolist(), part.is_label.tolist()] == [own.ids.tolist(), own.is_label.tolist()]
            assert part.extras == own.extras
    whole = samples[0].lengths[0]
    (cut,) = encoded(folder, PAIR, tokenizer=tokenizer, trainer="dpo", max_length=whole, truncate="right").samples
    assert cut.lengths == (whole, whole) and len(cut.extras.files) == 4
    with pytest.raises(InputError, match=rf"has {whole + 2} tokens, 5 of them of images, over max_length {whole}"):
        encoded(folder, PAIR, tokenizer=tokenizer, trainer="dpo", max_length=whole)
    missing = PAIR | {"images": ["no.png", "a.png"]}
    with pytest.raises(InputError, match=r"line 1, chosen: the image .*no\.png does not exist"):
        encoded(folder, missing, tokenizer=tokenizer, trainer="dpo")
    found = encoded(folder, PAIR, missing, tokenizer=tokenizer, trainer="dpo", on_bad_row="skip")
    assert (len(found.samples), len(found.skipped)) == (1, 1)
    with pytest.raises(InputError, match=r"line 1: the row has images, which train\.trainer: orpo does not take"):
        encoded(folder, PAIR, tokenizer=tokenizer, trainer="orpo")


def image(path: Any) -> dict[str, Any]:
    return {"messages": user({"type": "image", "path": path}, TEXT)}


def too_large() -> str:
    """What Pillow says of a text that grows over its limit: not the same in every release."""
    with pytest.raises(ValueError) as error:
        PngImagePlugin._safe_zlib_decompress(zlib.compress(bytes(PngImagePlugin.MAX_TEXT_CHUNK + 1)))
    return str(error.value)


BAD: dict[str, tuple[Any, str]] = {
    "missing": (image("no.png"), "no.png does not exist"),
    "an address": (image("https://x.org/a.png"), "download the image"),
    "a data address": (image("data:image/png;base64,AAAA"), "download the image"),
    "outside": (image("../outside.png"), "lies outside of the data file's folder; give its absolute path"),
    "behind a link": (image("link.png"), "lies outside of the data file's folder"),
    "a folder": (image("."), "is no file"),
    "a pipe": (image("pipe.png"), "is no file"),
    "broken": (image("broken.png"), "cannot be decoded"),
    "cut off": (image("cut.png"), "cannot be decoded"),
    "no image": (image("rows.jsonl"), "rows.jsonl cannot be decoded; formats are PNG, JPEG"),
    "a format that runs programs": (image("run.eps"), "cannot be decoded"),
    "with 16 bits": (image("deep.png"), "it has grey values from 7 to 65535 in mode I;16; save it with 8 bits"),
    "of floats": (image("floats.tiff"), "it has grey values from 0 to 0.5 in mode F; save it with 8 bits"),
    "a line": (image("line.png"), "it is 601 x 3, and a side is at most 200 times the other"),
    "a bomb in its text": (image("text.png"), too_large()),
    "huge": (image("huge.png"), f"is too large, at most {MOST_PIXELS} pixels are read"),
    "too large": (image("large.png"), f"at most {MOST_PIXELS} pixels are read (9000 x 9000 pixels)"),
    "none for the model": (image("wide.png"), "is none for this model: thirteen"),
    "bytes": ({"messages": FORMS["blocks with paths"]["messages"][1:], "images": [{"bytes": "x"}]}, "not by its bytes"),
    "of an assistant": ({"messages": [{"role": "assistant", "content": [{"type": "image", "path": "a.png"}]}]}, "writes text"),
    "too few paths": ({"messages": user({"type": "image"}, {"type": "image"}), "images": ["a.png"]}, "each image has its path"),
    "paths twice": (image("a.png") | {"images": ["a.png"]}, "each image has its path in one of both"),
    "no paths": ({"messages": user({"type": "image"}, TEXT)}, "each image has its path in one of both"),
    "a video": ({"messages": user({"type": "video", "path": "a.mp4"})}, "known are {type: text, text}"),
    "an address in a block": ({"messages": user({"type": "image_url", "image_url": {}})}, "known are {type: text, text}"),
    "of a text": ({"text": "the dog", "images": ["a.png"]}, "'images' goes with a prompt or messages"),
    "a mark in a text": (
        {"messages": user({"type": "image", "path": "a.png"}, {"type": "text", "text": MARK})}, "and 1 are given; it is not"
    ),
    "a mark without images": ({"messages": user({"type": "text", "text": MARK})}, "the token stands in a text as well"),
}  # fmt: skip


def bombs(folder: Path) -> None:
    """Files that are not what they say."""
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    os.mkfifo(folder / "pipe.png")
    whole = (folder / "a.png").read_bytes()
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"junk" * 9)
    pillow.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / "noise.png")
    (folder / "cut.png").write_bytes((folder / "noise.png").read_bytes()[:900])
    (folder / "run.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EOF\n")
    for name, side in (("huge", 60000), ("large", 9000)):
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        chunk = struct.pack(">I", len(header)) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
        (folder / f"{name}.png").write_bytes(whole[:8] + chunk + whole[33:])
    pillow.new("RGB", (13, 4)).save(folder / "wide.png")
    pillow.new("RGB", (601, 3)).save(folder / "line.png")
    pillow.fromarray(np.array([[7, 65535]], np.uint16)).save(folder / "deep.png")
    pillow.fromarray(np.array([[0, 0.5]], np.float32)).save(folder / "floats.tiff")
    text = b"zTXtk\0\0" + zlib.compress(bytes(3_000_000))
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    (folder / "text.png").write_bytes(whole[:33] + chunk + whole[33:])


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_image_is_refused_with_its_line_or_skipped(bad: str, folder: Path, tokenizer: Any) -> None:
    row, problem = BAD[bad]
    bombs(folder)
    good = FORMS["a prompt"]
    with pytest.raises(InputError) as error:
        encoded(folder, good, row, tokenizer=tokenizer)
    assert "job 'job': " in str(error.value) and "rows.jsonl, line 2: " in str(error.value)
    assert problem in str(error.value)
    found = encoded(folder, good, row, tokenizer=tokenizer, on_bad_row="skip")
    assert len(found.samples) == 1 and problem in found.skipped[0]


def test_an_absolute_path_may_lie_anywhere(folder: Path, tokenizer: Any) -> None:
    (sample,) = encoded(folder, image(str(folder.parent / "outside.png")), tokenizer=tokenizer).samples
    assert sample.extras.counts == (4,)


def test_where_images_are_not_read_they_are_refused(folder: Path, tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"line 1: the row has images, which are not read under data\.streaming"):
        encoded(folder, FORMS["a prompt"], tokenizer=tokenizer, shown=False)


def test_more_tokens_than_fit_are_refused_with_how_many_are_of_images(folder: Path, tokenizer: Any) -> None:
    with pytest.raises(
        InputError, match="5 of them of images, over max_length 8; raise it, use smaller images, or set"
    ):
        encoded(folder, FORMS["a prompt"], tokenizer=tokenizer, max_length=8)
    with pytest.raises(InputError, match="over the model's context of 8; use smaller images, or set truncate to drop"):
        encoded(folder, FORMS["a prompt"], tokenizer=tokenizer, context=8)
    whole = encoded(folder, image("a.png"), tokenizer=tokenizer).samples[0].num_tokens
    some = encoded(folder, FORMS["a prompt"], image("a.png"), tokenizer=tokenizer, max_length=whole, truncate="drop")
    assert (len(some.samples), some.dropped) == (1, 1)


@pytest.mark.parametrize(
    ("limit", "left", "files"), [(12, 12, 2), (11, 11, 2), (10, 6, 1), (7, 6, 1), (5, 5, 1), (4, 2, 0), (1, 1, 0)]
)
def test_no_image_is_cut_through(limit: int, left: int, files: int) -> None:
    ids = np.array([7, 7, 4, 4, 4, 7, 4, 4, 4, 4, 4, 7])
    images = Images(("a", "b"), (3, 5), 4)  # type: ignore[arg-type]
    stop, kept = images.cut(ids, limit)
    assert stop == left and (0 if kept is None else len(kept.files)) == files


def test_what_changed_since_it_was_checked_is_noticed_when_it_is_decoded(folder: Path, tokenizer: Any) -> None:
    (sample,) = encoded(folder, image("a.png"), tokenizer=tokenizer).samples
    (file,) = sample.extras.files
    assert file.decode().size == (2, 4)
    pillow.new("RGB", (2, 4)).save(folder / "a.png")
    with pytest.raises(InputError, match=r"a\.png has changed since the run began"):
        file.decode()


def test_odd_files_are_what_transformers_makes_of_them(folder: Path) -> None:
    """In every colour mode, turned in every way, of several frames the first."""
    draw = np.random.default_rng(0)
    frames = [pillow.fromarray(draw.integers(0, 256, (5, 8, 3), dtype=np.uint8)) for _ in range(2)]
    colours, few = frames[0], frames[0].quantize(16)
    clear = colours.convert("RGBA")
    clear.putalpha(frames[1].convert("L"))
    few_grey = pillow.fromarray(draw.integers(0, 256, (5, 8)).astype(np.uint16))
    odd: dict[str, tuple[pillow.Image, dict[str, Any]]] = {
        "cmyk.jpg": (colours.convert("CMYK"), {}), "palette.png": (few, {"transparency": 3}), "clear.png": (clear, {}),
        "grey.png": (clear.convert("LA"), {}), "one.png": (colours.convert("1"), {}),
        "ycc.tiff": (colours.convert("YCbCr"), {}),
        "deep.png": (few_grey, {}), "moving.gif": (few, {"save_all": True, "append_images": frames}),
        "moving.png": (colours, {"save_all": True, "append_images": frames}),
    }  # fmt: skip
    for turn in range(1, 9):
        exif = pillow.Exif()
        exif[0x0112] = turn
        odd[f"turned{turn}.png"] = colours, {"exif": exif}
    for name, (own, how) in odd.items():
        own.save(folder / name, **how)
        if name == "ycc.tiff" and int(PIL.__version__.partition(".")[0]) < 13:  # does not read back what it wrote
            with pytest.raises(OSError, match="truncated"):
                load_image(str(folder / name))
            with pytest.raises(InputError, match=r"ycc\.tiff cannot be decoded \(image file is truncated"):
                decode(str(folder / name))
            continue
        _, found = decode(str(folder / name))
        wanted = load_image(str(folder / name))
        assert found.mode == "RGB" and np.array_equal(np.asarray(found), np.asarray(wanted)), name


def test_a_photo_is_decoded_upright_and_in_three_colours(folder: Path) -> None:
    photo = pillow.new("L", (6, 2), 7)
    exif = pillow.Exif()
    exif[0x0112] = 6  # turned by a quarter
    photo.save(folder / "photo.jpg", exif=exif)
    _, image = decode(str(folder / "photo.jpg"))
    assert (image.mode, image.size) == ("RGB", (2, 6))
