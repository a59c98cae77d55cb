"""What tells whether a norm of norms.py stands: what the host saw of its operands, and the check of their data on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from packlora.adapters.sight import Sight, sight_of
from packlora.ops.stamp import version

if TYPE_CHECKING:
    from packlora.adapters.norms import NormHandle


class Seen:
    """What the host saw of a handle: its operands, the scaling, and how often it was told of changes."""

    __slots__ = ("A", "B", "epoch", "scaling", "steps", "weight")

    def __init__(self, handle: NormHandle) -> None:
        self.A, self.B, self.weight = Sight(handle.A), Sight(handle.B), sight_of(handle._known_by())
        self.scaling, self.epoch, self.steps = handle.scaling, handle._epoch, handle._steps

    def stands(self, handle: NormHandle) -> bool:
        """Whether it sees the same now."""
        return (
            self.steps == handle._steps and self.epoch == handle._epoch and self.scaling == handle.scaling
            and self.A.stands(handle.A) and self.B.stands(handle.B) and self.weight.stands(handle._known_by())
        )  # fmt: skip

    def follows(self, handle: NormHandle) -> bool:
        """Whether at most the elements of A and B are others; if so, it is what the host sees now."""
        A, B = handle.A, handle.B
        if not (
            self.epoch == handle._epoch and self.scaling == handle.scaling and self.A.lies(A) and self.B.lies(B)
            and self.weight.stands(handle._known_by())
        ):  # fmt: skip
            return False
        self.A.version, self.B.version, self.steps = version(A), version(B), handle._steps
        return True


class Check:
    """Modules whose data are checked and whose norms are computed on the device, in one batch.

    It serves while they are where they were. After a change of a frozen weight that the host sees, base_N is another tensor, at
    another address (the old one is held here), and the modules get another Check, which has seen nothing yet.
    """

    def __init__(self, handles: Sequence[NormHandle]) -> None:
        from packlora.ops.row_norm.triton_path import batch_of

        self.numbers = [handle.number for handle in handles]
        self.sights = [Seen(handle) for handle in handles]
        self.batch = batch_of([handle._problem() for handle in handles])
        device = handles[0].A.device
        self.seen = torch.zeros(len(handles), 5, dtype=torch.int64, device=device)
        self.kept = torch.empty(sum(self.batch.sizes), dtype=torch.float32, device=device)
        self.bases = [handle._base_N() for handle in handles]

    def norms(self) -> list[torch.Tensor]:
        """Of all of them, computed where the data changed."""
        with torch.inference_mode(False):  # they are saved for backwards
            return self.batch.split(self.batch.run(self.batch.stale(self.seen), self.kept))


@dataclass(slots=True)
class Together:
    """What a window checks: the numbers of the handles in use, the checks on devices with the indices of their handles, and
    the indices of the others, which are looked at one by one when they are asked for."""

    numbers: list[int]
    checks: list[Check]
    checked: list[int]
    others: list[int]

    @classmethod
    def of(cls, handles: Sequence[NormHandle]) -> Together:
        ready = [index for index, handle in enumerate(handles) if handle._missing() is None and handle._on_device()]
        checks, checked = [], []
        if ready:
            from packlora.ops.row_norm.tables import batches

            for found in batches([handles[index]._problem() for index in ready]):
                checked += [ready[at] for at in found]
                checks.append(Check([handles[ready[at]] for at in found]))
        others = sorted({*range(len(handles))} - {*ready})
        return cls([handle.number for handle in handles], checks, checked, others)

    def fits(self, handles: Sequence[NormHandle]) -> bool:
        """Whether the elements of A's and B's are all that may have changed; it is up to date then."""
        if self.numbers != [handle.number for handle in handles]:
            return False
        sights = itertools.chain.from_iterable(check.sights for check in self.checks)
        if not all(seen.follows(handles[index]) for index, seen in zip(self.checked, sights, strict=True)):
            return False
        others = (handles[index] for index in self.others)
        return not any(handle._missing() is None and handle._on_device() for handle in others)
