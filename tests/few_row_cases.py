"""Groups of layers with few tokens, run without gradients by few_rows.py and by the chain. Used on the CPU and on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from group_cases import KINDS, GroupCase, make_case, poisoned, renumbered
from seeds import SEED

from packlora.ops.lora_linear import few_rows
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.moving import MovingSegments
from packlora.ops.lora_linear.plan import CHAIN, Plan
from packlora.ops.lora_linear.prepared import GroupState

CASES = {
    "one adapter": (False,), "all tokens": (False, True), "siblings": (False,), "four adapters": (False, True),
    "six adapters, siblings, some absent": (False, True), "DoRA, rank 40": (False,), "DoRA with a trained bias": (False,),
    "DoRA and LoRA, siblings, some absent, biases": (False, True),
}  # fmt: skip


def drawn(
    kind: str, trial: int, dtype: torch.dtype = torch.float16, K: int = 72, sizes: Sequence[int] = (37, 160, 16),
    T: int = 29, device: str = "cpu",
) -> GroupCase:  # fmt: skip
    """Without dropout, as where no gradients are needed."""
    settings: dict[str, Any] = KINDS[kind] | {"dropouts": [0.0] * len(KINDS[kind]["ranks"])}
    sizes = sizes[: len(settings["ranks"][0])]
    how: dict[str, Any] = {"seed": SEED + trial, "dtype": dtype, "device": device, **settings}
    return make_case(T + trial, K, sizes, with_bias=trial % 2 > 0, **how)


def outputs(own: GroupCase, moving: MovingSegments | None = None, plan: Plan = CHAIN) -> dict[str, torch.Tensor]:
    segments, how = own.segments, dict[str, Any]()
    if moving is not None:
        of = {segment.adapter: segment for segment in own.segments}
        segments = tuple(
            replace(of.get(number, own.segments[0]), adapter=number, start=start, stop=stop)
            for number, start, stop in moving.nominal
        )
        moving.write([(s.adapter, s.start, s.stop) for s in own.segments])
        how = {"boundaries": moving, "state": GroupState(version_counted=True)}
    with torch.no_grad():
        found = lora_group(own.x, own.layers, segments, None, 0, plan, **how)
    return {f"y{index}": y.double() for index, y in enumerate(found)}


def by_few_rows(own: GroupCase, moves: bool) -> dict[str, torch.Tensor]:
    """Outputs of a call that goes by few_rows.py, with poisoned buffers."""
    own = renumbered(own)
    moving = MovingSegments(len(own.x), sorted({segment.adapter for segment in own.segments})) if moves else None
    seen: list[int] = []
    computed = few_rows.outputs

    def noted(call: Any, *args: Any) -> list[torch.Tensor]:
        seen.append(call.T)
        return computed(call, *args)

    with mock.patch.object(few_rows, "outputs", noted), poisoned():
        found = outputs(own, moving)
    assert seen == [len(own.x)]
    return found
