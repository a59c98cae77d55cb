"""JSON file of measurements on one device, with their identity: device, versions and the like.

Writers take turns and merge; readers see the old file or the new one. Figures of another device or version say nothing about
here and now, so a file of these, or a broken one, is not read, and is replaced by the next write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from packlora.plans.identity import cache_path, device_name, measured_versions

T = TypeVar("T")
DAMAGED = (ValueError, OverflowError, KeyError, TypeError, AttributeError)
"""Errors of reading a record that nobody has written: numbers of any size among others."""


class DeviceFile(Generic[T]):
    """Records by key.

    Args:
        device: that they were measured on.
        part: key of the records in the file.
        schema: of a record.
        read: makes a record of JSON. Raises one of DAMAGED for anything that `written` cannot have written.
        written: makes JSON of a record.
        path: of the file; by default <folder>/<device>.json in the cache.
        folder: by default that of the name of `part`.
        identity: what else must be the same for the records to be used.
    """

    def __init__(
        self, device: torch.device, part: str, schema: int, read: Callable[[Any], T], written: Callable[[T], Any],
        path: Path | None = None, folder: str = "", **identity: Any,
    ) -> None:  # fmt: skip
        self.path, self.part = path or cache_path(device, folder or part), part
        own = {"schema": schema, "device": device_name(device), "versions": measured_versions()}
        self.identity: dict[str, Any] = own | identity
        self._record, self._written = read, written

    def read(self) -> tuple[dict[str, T], str]:
        """The records; and why a file that is there is not used, "" where it is or there is none."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            for name, ours in self.identity.items():
                if found[name] != ours:
                    raise ValueError(f"its {name} is {found[name]}, here it is {ours}")
            return {str(key): self._record(value) for key, value in found[self.part].items()}, ""
        except FileNotFoundError:
            return {}, ""
        except (OSError, RecursionError, *DAMAGED) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            return {}, f"{self.path}: {reason}"

    def put(self, records: Mapping[str, T]) -> dict[str, T]:
        """Add or replace records, keep those that others have written since, and give all. Raises OSError where nothing can be
        written."""
        from packlora.files import write_json  # readers alone do without these
        from packlora.portable import one_at_a_time

        self.path.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(self.path.with_suffix(".lock")):
            merged = {**self.read()[0], **records}
            content = {key: self._written(merged[key]) for key in sorted(merged)}
            write_json(self.path, {**self.identity, self.part: content})
        return merged
