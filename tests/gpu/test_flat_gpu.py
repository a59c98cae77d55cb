"""The optimizer over the parameters of a job as one tensor, on a GPU: torch's fused kernel.

make gpu
"""

from __future__ import annotations

import pytest
import torch
from waits import no_waiting

from packlora.adapters.flat import FlatLayout, total_norm
from packlora.config import TrainConfig
from packlora.runtime.optimizer import FlatAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

SHAPES: dict[str, tuple[int, ...]] = {
    "q/A": (8, 1000),
    "q/B": (3001, 8),
    "v/A": (3, 37),
    "v/B": (5, 3),
    "q/bias": (77,),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_torchs_fused_adamw_move_versions_and_wait_for_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layout = FlatLayout(SHAPES)
    flat = torch.zeros(layout.size, dtype=dtype, device="cuda")
    for view in layout.views(flat).values():
        view.normal_()
    ours = {name: torch.nn.Parameter(view) for name, view in layout.views(flat).items()}
    theirs = {name: torch.nn.Parameter(view.clone()) for name, view in layout.views(flat).items()}
    optimizer = FlatAdamW(flat, layout, TrainConfig(weight_decay=0.1))
    groups = [{"params": [theirs[name] for name in SHAPES if "bias" not in name]}]
    groups.append({"params": [theirs["q/bias"]], "weight_decay": 0.0})  # type: ignore[dict-item]
    torchs = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)
    for number in range(5):
        without = {"v/A", "q/bias"} if number == 2 else set[str]()
        gradient = torch.zeros_like(flat)
        for name, view in layout.views(gradient).items():
            theirs[name].grad = None if name in without else view.normal_()
        versions = [parameter._version for parameter in ours.values()]
        with no_waiting():
            optimizer.step(gradient, without, 1e-2)
        torchs.step()
        assert all(p._version > old for p, old in zip(ours.values(), versions, strict=True))
        assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES), number


def test_the_norm_of_many_elements_is_that_of_float64() -> None:
    flat = torch.randn(2**24, device="cuda")
    torch.testing.assert_close(total_norm(flat).double(), flat.double().norm(), rtol=2e-6, atol=0)
