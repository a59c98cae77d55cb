"""The power goes at any moment of a run: whatever has reached the disk by then holds a whole checkpoint with all lines of its
log history, and is gone on from to the same bits.

Disks are modelled: what a file held when it was last synced is there, and nothing else of it. Of names either those are there
that their folder had when it was synced, or all that there were, as a file system may write names and not what they lead to.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import packlora
from packlora.report.journal import read_record
from packlora.runtime import checkpoint, history

STEPS, PIECE = 8, 2
Image = dict[str, bytes]
"""What is on a disk, by path."""


class Disk:
    """What has reached the disk of what is below a folder, noted at every sync and every change of a name."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.images = folder, list[Image]()
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._held: list[int] = []
        """Handles of all that was seen, so that no number of a file is given to another one."""
        self._noting = threading.Lock()
        for name in ("replace", "unlink", "rmdir", "mkdir", "rename"):
            self._note_after(monkeypatch, name)
        monkeypatch.setattr(os, "fsync", self._sync)

    def _note_after(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        original = getattr(os, name)

        def changed(*args: Any, **kwargs: Any) -> Any:
            with self._noting:
                found = original(*args, **kwargs)
                self._note()
            return found

        monkeypatch.setattr(os, name, changed)

    def _sync(self, handle: int) -> None:
        with self._noting:
            path = f"/proc/self/fd/{handle}"
            self._held.append(os.open(path, os.O_RDONLY))
            number = os.fstat(handle).st_ino
            if os.path.isdir(path):
                self._names[number] = {entry.name: entry.inode() for entry in os.scandir(path)}
            else:
                self._contents[number] = Path(path).read_bytes()
            self._note()

    def _note(self) -> None:
        folders, files = dict[int, Path](), dict[int, str]()
        now: Image = {}
        for path in [self.folder, *self.folder.rglob("*")]:
            number, own = path.lstat().st_ino, str(path.relative_to(self.folder))
            if path.is_dir():
                folders[number] = path
            else:
                files[number] = own
                now[own] = self._contents.get(number, b"")
        self.images += [now, self._synced(self.folder.stat().st_ino, "")]

    def _synced(self, folder: int, at: str) -> Image:
        """What lies below a folder by names that were synced."""
        out: Image = {}
        for name, number in self._names.get(folder, {}).items():
            if number in self._names:
                out |= self._synced(number, f"{at}{name}/")
            elif number in self._contents:
                out[at + name] = self._contents[number]
        return out

    def distinct(self) -> list[Image]:
        """The images that differ in what a job goes on from."""
        found: dict[int, Image] = {}
        for image in self.images:
            kept = {
                name: own
                for name, own in image.items()
                if name.startswith("a/") or name in ("run.json", "journal.jsonl")
            }
            found.setdefault(hash(tuple(sorted((name, hash(own)) for name, own in kept.items()))), image)
        return list(found.values())


def write(image: Image, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in image.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)


def test_whenever_the_power_goes_the_newest_checkpoint_is_whole_with_all_of_its_lines(
    tiny_base: Callable[[], str], write_rows: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "PIECE", PIECE)
    rows, whole = write_rows("rows", 4), tmp_path / "whole"
    job = {"name": "a", "data": {"path": rows}, "adapter": {"r": 2, "target_modules": ["q_proj"]}}
    job["train"] = {"max_steps": STEPS, "global_batch_size": 1, "learning_rate": 1e-2}
    tree = {
        "base_model": tiny_base(), "output_dir": str(whole), "save_every": 2, "save_total_limit": 1, "jobs": [job],
    }  # fmt: skip
    with monkeypatch.context() as patch:
        whole.mkdir()
        disk = Disk(whole, patch)
        assert packlora.train(tree).status == "done"
    run = read_record(whole)["id"]
    lines = json.loads((whole / "a" / "trainer_state.json").read_text())["log_history"]
    images, pieces, at = disk.distinct(), 0, tmp_path / "image"
    goes_on: dict[int, Image] = {}
    for image in images:
        write(image, at)
        if "run.json" not in image:  # nothing was promised yet
            assert not checkpoint.steps(at / "a")
            continue
        promised = read_record(at)["saved"]["a"]
        step = max(checkpoint.steps(at / "a"), default=0)
        assert step >= promised
        if step:
            checkpoint.check(at / "a" / f"checkpoint-{step}", "a", run, step)
            state = json.loads((at / "a" / f"checkpoint-{step}" / "trainer_state.json").read_text())
            earlier, lost = history.read(at / "a", state.get(checkpoint.EARLIER))
            assert lost is None and earlier + state["log_history"] == lines[:step]
            pieces = max(pieces, len(earlier))
            goes_on[step] = image
    assert len(images) > 50 and pieces >= STEPS - 2 * PIECE and set(goes_on) == set(range(2, STEPS + 1, 2))
    write(goes_on[STEPS - 2], at)
    assert packlora.train({**tree, "output_dir": str(at)}, resume=True).status == "done"
    found = json.loads((at / "a" / "trainer_state.json").read_text())["log_history"]
    assert [line["loss"] for line in found] == [line["loss"] for line in lines]
    weights = "a/adapter_model.safetensors"
    assert (at / weights).read_bytes() == (whole / weights).read_bytes()
