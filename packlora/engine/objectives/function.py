"""A user's own objective: a function in a Python file that the run file names (`train.objective: FILE.py:FUNCTION`).

    def loss(logp, rows):
        return -rows.column("advantage") * logp

It is given the log-probabilities of the labels of some samples, float64 [L], and returns losses, [L] or [N], or losses and a
mapping of sums over samples that are logged. Columns are fields of the data rows. The file is one that the user has on this
machine; nothing is fetched, and nothing that came with a model is run.

What is wrong is found before training, by trials on the first samples: on the CPU with made-up log-probabilities, and once more
on tensors without values, which fails where the function would wait for the device.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from packlora.data.encode import Sample
from packlora.engine.objective import Column, Evaluate, Facts, Objective, RowsView
from packlora.engine.rows import Row
from packlora.errors import InputError, quoted, reason_of
from packlora.functions import load_function, place_of
from packlora.ops.wide import widened

TRIED = 4
"""Samples that the function is tried on."""
GROUP, REFERENCE = "group", "reference"
"""Columns that are no fields: of pairs, whether a label is of the chosen completion (1) or of the rejected one (2); and each
label's log-probability under the reference, or the base model."""
PREFIX = "objective/"
"""Prefix of the names of logged sums."""
WEIGHTS = ("row", "sample")


class FunctionObjective(Objective):
    """An objective by a function. It is of use once it was `tried`.

    spec: as in the run file.
    """

    name = "function"

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.file, self._function = load_function(spec, "train.objective")
        self.weights = getattr(self._function, "weights", "sample")
        if self.weights not in WEIGHTS:
            raise InputError(
                f"train.objective {spec}: its attribute `weights` is {quoted(self.weights)}; it is one of {', '.join(WEIGHTS)}"
            )
        self._references: dict[int, np.ndarray] | None = None

    # --- trials ------------------------------------------------------------------------------------------------------------

    def tried(self, samples: Sequence[Sample], where: Sequence[str] = ()) -> FunctionObjective:
        """The objective, with what trials tell of it: its columns, its unit and its metrics.

        Args:
            samples: of the job; all of them must have the columns.
            where: file and line of each.

        Raises:
            InputError: a column is missing, losses have a wrong shape or no gradient, or the function fails or waits.
        """
        rows = [Row(sample) for sample in _unlike(samples)]
        asked = _Asked(self, rows)
        labels = sum(row.sample.num_labels for row in rows)
        logp_L = -torch.arange(1, labels + 1, dtype=torch.float64) / labels
        view = RowsView(tuple(row.sample.num_labels for row in rows), {}, {}, asked)
        leaf = logp_L.requires_grad_()
        try:
            losses, sums = self._called(leaf, view)
        except _MissingError as error:
            at = next(n for n, sample in enumerate(samples) if sample is rows[error.row].sample)
            raise InputError(
                self._problem_of(samples[at], error.name, where[at] if where else f"sample {at + 1}")
            ) from None
        self.unit = self._unit_of(losses, view)
        self.metrics = tuple(sums)
        self.columns = {name: Column("label") for name in asked.names}
        self.has_reference = REFERENCE in asked.names
        self._check_gradient(losses, leaf)
        for at, sample in enumerate(samples):
            for name in asked.names:
                if not _has(sample, name):
                    raise InputError(self._problem_of(sample, name, where[at] if where else f"sample {at + 1}"))
        if self.weights == "row":
            self._check_rows(logp_L.detach(), view)
        self._check_waits(logp_L, view)
        return self

    def _refused(self, problem: str) -> InputError:
        return InputError(f"train.objective {self.spec}: {problem}")

    def _check_gradient(self, losses: torch.Tensor, leaf: torch.Tensor) -> None:
        found = torch.autograd.grad(losses.sum(), leaf, allow_unused=True)[0] if losses.requires_grad else None
        if found is None:
            raise self._refused("its losses do not depend on the log-probabilities, so nothing would be learnt")
        if not found.isfinite().all() or not losses.isfinite().all():
            raise self._refused("its losses or their gradient are not finite on log-probabilities between -1 and 0")

    def _check_rows(self, logp_L: torch.Tensor, view: RowsView) -> None:
        """Run the function on two halves of the labels; together they must give the result on all labels."""
        found, middle = [], len(logp_L) // 2
        for start, stop in ((0, len(logp_L)), (0, middle), (middle, len(logp_L))):
            leaf = logp_L[start:stop].clone().requires_grad_()
            losses, _ = self._called(leaf, view.labels(start, stop))
            gradient = torch.autograd.grad(losses.sum(), leaf, allow_unused=True)[0] if losses.requires_grad else None
            found.append(torch.zeros_like(leaf) if gradient is None else gradient)
        if not torch.allclose(found[0], torch.cat(found[1:]), rtol=1e-9, atol=1e-12):
            raise self._refused(
                'its attribute `weights` is "row", but a label\'s gradient depends on other labels; leave the attribute out'
            )

    def _check_waits(self, logp_L: torch.Tensor, view: RowsView) -> None:
        """Run it on tensors without values: what reads a value fails, as it would wait for a GPU, and so does a tensor that is
        made on the CPU."""
        tensors = {name: view.column(name).to("meta") for name in self.columns}
        try:
            self._function(logp_L.detach().to("meta").requires_grad_(), RowsView(view.lengths, {}, {}, tensors))
        except Exception as error:  # any code of a user
            if "not on the expected device" in str(error):
                raise self._refused(
                    f"{place_of(error, self.file)} has a tensor on another device than logp; make it with device=logp.device"
                ) from None
            raise self._refused(
                f"{place_of(error, self.file)} reads a value of a tensor, which waits for the device at every "
                f"microbatch; leave out .item(), .tolist(), if and indexing by a mask ({reason_of(error)})"
            ) from None

    def _problem_of(self, sample: Sample, name: str, where: str) -> str:
        line = next(iter(_lines_with(self.file, name)), None)
        asked = f"rows.column({name!r}) in {self.file}" + (f", line {line}" if line is not None else "")
        found = sample.columns.get(name)
        if found is None:
            return f"{where}: the row has no numbers in a field {name!r}, which {asked} asks for"
        return (
            f"{where}: field {name!r} has {found.size} numbers for {sample.num_labels} label tokens; {asked} takes one number "
            "for all, or one for each"
        )

    # --- the protocol ------------------------------------------------------------------------------------------------------

    def columns_of(self, rows: Sequence[Row]) -> Mapping[str, np.ndarray]:
        """Values of each column [L]."""
        return {name: np.concatenate([self._values(row.sample, name) for row in rows]) for name in self.columns}

    def _values(self, sample: Sample, name: str) -> np.ndarray:
        """Values of a column [l] of a sample."""
        if name == REFERENCE:
            return np.zeros(sample.num_labels) if self._references is None else self._references[id(sample)]
        if name == GROUP and (groups := sample.label_groups) is not None:
            return groups
        return np.broadcast_to(sample.columns[name], sample.num_labels)

    def learn(self, samples: Sequence[Sample], held_out: Sequence[Sample], evaluate: Evaluate) -> bool:
        """Find the log-probabilities of all labels under the reference."""
        if not self.has_reference or self._references is not None:
            return True
        own = list({id(sample): sample for sample in [*samples, *held_out]}.values())
        found = evaluate.reference(own, keep=True)
        if found is None:
            return False
        self._references = dict(zip(map(id, own), found, strict=True))
        return True

    def loss(self, logp_L: torch.Tensor, rows: RowsView) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [L] or [N], and sums of its metrics [M]. Raises InputError where they are not as on the trial."""
        losses, sums = self._called(logp_L, rows)
        wanted = (sum(rows.lengths),) if self.unit == "token" else (len(rows.lengths),)
        if tuple(losses.shape) != wanted or tuple(sums) != self.metrics:
            raise self._refused(
                f"losses {tuple(losses.shape)} and sums {list(sums)} for {len(rows.lengths)} samples with "
                f"{sum(rows.lengths)} labels; on the first samples it gave one loss a {self.unit} and sums {list(self.metrics)}"
            )
        found = [widened(sums[name].detach()).sum()[None] for name in self.metrics]
        return losses, torch.cat([logp_L.new_zeros(0), *found])

    def report(self, sums: Sequence[float], facts: Facts) -> dict[str, float]:
        """Means over the samples of the global batch."""
        return {PREFIX + name: value / facts["samples"] for name, value in zip(self.metrics, sums, strict=True)}

    def _called(self, logp_L: torch.Tensor, rows: RowsView) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        try:
            found = self._function(logp_L, rows)
        except (_MissingError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any code of a user
            raise self._refused(f"{place_of(error, self.file)} failed: {reason_of(error)}") from None
        losses, sums = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(losses, torch.Tensor) or not losses.is_floating_point() or not _are_sums(sums):
            raise self._refused(
                f"it returned {_said(found)}; it returns losses, a tensor of one number a label or a sample, or "
                "these and a mapping of names to tensors"
            )
        return widened(losses), sums

    def _unit_of(self, losses: torch.Tensor, view: RowsView) -> Any:
        labels, samples = sum(view.lengths), len(view.lengths)
        if losses.shape == (labels,):
            return "token"
        if losses.shape == (samples,) and self.weights == "sample":
            return "sample"
        what = f"one for each of {labels} labels" + (f" or {samples} samples" if self.weights == "sample" else "")
        raise self._refused(f"its losses have the shape {tuple(losses.shape)}; they are {what}")


class _MissingError(Exception):
    """A column that a row of a trial lacks."""

    def __init__(self, name: str, row: int) -> None:
        super().__init__(name)
        self.name, self.row = name, row


class _Asked(Mapping[str, torch.Tensor]):
    """Columns of the rows of a trial, made when they are read. names: of those that were."""

    def __init__(self, objective: FunctionObjective, rows: Sequence[Row]) -> None:
        self._objective, self._rows = objective, rows
        self.names: dict[str, None] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        for at, row in enumerate(self._rows):
            if not _has(row.sample, name):
                raise _MissingError(name, at)
        self.names[name] = None
        return torch.from_numpy(np.concatenate([self._objective._values(row.sample, name) for row in self._rows]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _has(sample: Sample, name: str) -> bool:
    """Whether a sample has a column, with a number for all of its labels or for each."""
    if name == REFERENCE or (name == GROUP and sample.label_groups is not None):
        return True
    found = sample.columns.get(name)
    return found is not None and (found.ndim == 0 or found.shape == (sample.num_labels,))


def _unlike(samples: Sequence[Sample]) -> list[Sample]:
    """The first samples, with more labels than samples where any sample has more than one."""
    found = list(samples[:TRIED])
    if all(sample.num_labels == 1 for sample in found):
        found += [sample for sample in samples[TRIED:] if sample.num_labels > 1][:1]
    return found


def _lines_with(file: str, name: str) -> list[int]:
    """Lines of a file with a text of these letters; none of what is no file, as a cell of a notebook."""
    if not Path(file).is_file():
        return []
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == name]


def _are_sums(sums: Any) -> bool:
    return isinstance(sums, Mapping) and all(
        isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_./-]+", name) and isinstance(value, torch.Tensor)
        for name, value in sums.items()
    )


def _said(found: Any) -> str:
    """Result of a function, in words."""
    if isinstance(found, torch.Tensor):
        return f"a tensor of {str(found.dtype).removeprefix('torch.')}"
    return f"a {type(found).__name__}"
