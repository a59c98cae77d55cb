"""Boundaries of a call's segments: on the host, in the segments themselves, or where a recorded call reads them (moving.py)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from packlora.ops.recent import Recent


class Boundaries(Protocol):
    """Place of the boundaries between segments, which decides on the tables and operands of a call."""

    @property
    def known(self) -> bool:
        """Whether the segments of calls have them. Else segments are nominal, and tables on the device have the boundaries."""

    @property
    def replayed(self) -> bool:
        """Whether calls are recorded and run again: whatever changes is at the same address all the time."""

    @property
    def most(self) -> int | None:
        """Most parts that segments and the tokens between them make; None where the segments say it."""

    @property
    def settled(self) -> Boundaries:
        """Boundaries that a call is settled for, and found again by."""

    def tables(self, key: Hashable, segments: Any, make: Callable[[], Any]) -> Any:
        """Tables of segments and of whatever else is in `key`, made where there are none yet."""

    def ready(self, prepared: Any, call: Any) -> None:
        """Bring the operands (prepared.Prepared) that a call reads up to date with the parameters."""

    def kept(self, key: Hashable, get: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor of the present parameters, where a call may read it. key: names what `get` gives."""


class OnHost:
    """The Boundaries of segments that say what they are."""

    known, replayed, most = True, False, None

    def __init__(self) -> None:
        self._tables: Recent[Any] = Recent(64)

    @property
    def settled(self) -> Boundaries:
        return self

    def tables(self, key: Hashable, segments: Any, make: Callable[[], Any]) -> Any:
        return self._tables.get((key, segments), make)

    def ready(self, prepared: Any, call: Any) -> None:
        prepared.refresh(call)

    def kept(self, key: Hashable, get: Callable[[], torch.Tensor]) -> torch.Tensor:
        return get()


ON_HOST = OnHost()
