"""What dtype: auto stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from packlora.base.device import settle_dtype, usual_dtype
from packlora.config import Run
from packlora.errors import InputError
from packlora.run_file import run_from


def run(out: Path, **keys: Any) -> Run:
    return run_from(
        {"base_model": "m", "output_dir": str(out), "jobs": [{"name": "a", "data": {"path": "a.jsonl"}}]} | keys
    )


@pytest.mark.parametrize("said", [{}, {"dtype": "auto"}])
@pytest.mark.parametrize(
    ("device", "capability", "dtype"),
    [
        ("auto", (9, 0), "bfloat16"), ("cuda", (8, 0), "bfloat16"), ("cuda:0", (12, 0), "bfloat16"),
        ("auto", (7, 5), "float16"), ("auto", None, "float32"), ("cpu", (9, 0), "float32"),
    ],
)  # fmt: skip
def test_it_is_bfloat16_where_the_device_computes_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, str], device: str, capability: tuple[int, int] | None,
    dtype: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    own = run(tmp_path / "out", device=device, **said)
    assert own.dtype == "auto" and usual_dtype(own) == dtype
    settle_dtype(own)
    assert own.dtype == dtype
    assert usual_dtype(run(tmp_path / "out", device=device, dtype="float16")) == "float16"


@pytest.mark.parametrize(("macos", "dtype"), [(14, "bfloat16"), (13, "float16")])
def test_it_is_16_bits_on_a_mac_s_gpu_and_float64_is_refused_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, macos: int, dtype: str
) -> None:
    with pytest.raises(InputError, match="'mps' is not there"):
        usual_dtype(run(tmp_path, device="mps"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: macos >= major)
    assert usual_dtype(run(tmp_path, device="mps")) == dtype
    assert usual_dtype(run(tmp_path)) == "float32"
    with pytest.raises(InputError, match="dtype: float64 is not there on device: mps"):
        settle_dtype(run(tmp_path, device="mps", dtype="float64"))


def test_an_amd_gpu_computes_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert usual_dtype(run(tmp_path)) == "bfloat16"


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="device: 'nonsense' is not a device"):
        usual_dtype(run(tmp_path, device="nonsense"))


@pytest.mark.parametrize(
    ("content", "dtype"),
    [
        ('{"config": {"dtype": "bfloat16"}}', "bfloat16"), ('{"config": {"dtype": [3]}}', "float32"),
        ('{"config": {"dtype": "auto"}}', "float32"), ("{", "float32"), ("{}", "float32"), ("[3]", "float32"),
    ],
)  # fmt: skip
def test_a_run_that_is_there_keeps_its_own_on_another_device(tmp_path: Path, content: str, dtype: str) -> None:
    (tmp_path / "run.json").write_text(content)
    assert usual_dtype(run(tmp_path)) == dtype
