"""The kernels' sizes in `packlora tune`, which measures them before the plans, and in `packlora doctor`."""

from __future__ import annotations

import time

import torch
from rich.text import Text

from packlora.errors import InputError, counted, plural
from packlora.ops.gpu import why_no_kernels
from packlora.plans import kernel_sizes
from packlora.plans.kernel_sizes import KernelCache, described
from packlora.report.screen import Screen
from packlora.tune.candidates import KERNELS
from packlora.tune.kernel_sizes import USUAL, Tuned, tune_kernels

PART = 0.4
"""Largest share of the tuning time that kernel sizes may take."""


def tune_sizes(device: torch.device, minutes: float, console: Screen) -> float:
    """Measure candidates that were not measured before, print the results, and use the best sizes from now on. Gives the
    minutes it took.

    Args:
        minutes: of all tuning.

    Raises:
        InputError: what was measured cannot be written.
    """
    if why_no_kernels(device) is not None:
        return 0.0
    cache, began = KernelCache(device), time.perf_counter()
    console.print(f"measuring sizes of {len(KERNELS)} kernels, in at most {PART * minutes:g} minutes", soft_wrap=True)
    out = []
    try:
        for item in tune_kernels(device, cache, 60 * PART * minutes):
            console.print(Text(f"{item.name}: {said(item)}"), soft_wrap=True)
            out.append(item)
    except OSError as error:
        raise InputError(f"cannot write measured sizes to {cache.path}: {error}") from None
    for item in out:
        for name, reason in item.record.failed.items():
            console.print(Text(f"left out: {item.name}: {name}: {reason}"), soft_wrap=True)
    if left := sum(item.left for item in out):
        console.print(
            f"note: {counted(left, 'candidate', 'are left')}, the same command goes on with them", soft_wrap=True
        )
    console.print(Text(f"remembered in {cache.path}"), soft_wrap=True)
    kernel_sizes.forget(device)
    kernel_sizes.use_tuned(device)
    return (time.perf_counter() - began) / 60


def said(item: Tuned) -> str:
    """Describe the result of one kernel in a line."""
    if item.error:
        return f"not measured: {item.error}"
    if not item.record.ratios:
        return f"the usual sizes; {plural(item.left, 'candidate')} not measured"
    chosen = described(item.record.fields)
    mean, worst = item.record.ratios.get(chosen, (1.0, 1.0))
    over = "" if chosen == USUAL else f", {mean:.3f} of the usual time, {worst:.3f} at worst"
    return f"{chosen}{over}; {plural(item.tried, 'candidate')} measured now, {item.left} left"


def described_sizes(device: torch.device) -> str:
    """Describe which kernels have sizes that were measured on this device, for `packlora doctor`."""
    if (reason := why_no_kernels(device)) is not None:
        return f"none: {reason}"
    records = KernelCache(device).known()
    if not records:
        return "the usual ones, an H200's; measure by packlora tune"
    changed = [f"{name} ({described(record.fields)})" for name, record in records.items() if record.fields]
    return f"{len(records)} kernels measured here; not the usual ones: {'; '.join(changed) or 'none'}"
