"""What the compiler makes of the kernels, for GPUs that are not here: they fit, spill little, and load in whole vectors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from group_cases import KINDS
from seeds import SOAK

from packlora.ops import gpu
from packlora.ops.lora_linear.kernels import sizes
from packlora.ops.lora_linear.layout import make_layout
from packlora.ops.lora_linear.tables import make_group_tables
from packlora.ops.row_norm import tables as row_norm_tables

SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""What a program can have, by compute capability."""
RARE = {"fingerprint_kernel", "finish_kernel", "experts_blocks_kernel", "cached_attention_kernel"}
"""With loads of one element: samples of W, rows that are computed anew, where groups of rows end, and a token's key."""


def compiled(target: int | str, cache: Path, *kinds: str) -> list[dict[str, Any]]:
    """What became of the kernels. What Triton has compiled before of the same sources is not compiled again, save in a soak."""
    script, root = Path(__file__).parent.parent / "compiled_kernels.py", Path(__file__).parent.parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(script.parent)])
    if SOAK:
        environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, script, str(target), *kinds], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB if SOAK else (90,))
def test_kernels_fit_and_load_whole_vectors(capability: int, tmp_path: Path) -> None:
    rows = compiled(capability, tmp_path)
    found = {row["kernel"] for row in rows}
    assert found >= {"down_kernel", "up_kernel", "grad_kernel", "inputs_kernel", "cross_kernel", "wide_tail_kernel"}
    assert found >= {
        "softmax_gradient_kernel",
        "part_sums_kernel",
        "part_gradient_kernel",
        "masked_kernel",
        "attention_keys_kernel",
        "rms_forward_kernel",
        "rms_backward_kernel",
        "experts_blocks_kernel",
        "experts_down_kernel",
        "experts_add_kernel",
        "experts_add_scaled_kernel",
        "dropped_kernel",
        "experts_sums_kernel",
        "cached_attention_kernel",
    }
    for kernel in ("coded_rows_kernel", "changed_rows_kernel", "scaled_rows_kernel", "change_kernel"):
        assert (kernel in found) == (capability == 90)
    assert ("fused_kernel" in found) == ("wide_cross_kernel" in found) == (capability in (90, 100))
    columns = {row["constants"]["BN"] for row in rows if row["kernel"] == "fused_kernel"}
    assert columns == ({"128", "256"} if capability in (90, 100) else set())
    for row in rows:
        assert row["shared"] <= SHARED_KIB[capability] * 1024, row
        if row["kernel"] not in RARE and row["constants"].get("ALIGNED_B") != "False":
            assert row["single"] <= 2, row
        if capability == 90:
            assert row["stack"] <= 64, row
        if row["kernel"] == "change_kernel":  # with what spills products would wait for one another
            assert row["stack"] == 0, row
        if row["kernel"].startswith("rms_"):  # short programs, of which many have to run at once
            assert row["stack"] == 0, row
            assert row["registers"] <= (128 if row["constants"]["BLOCK"] == "16384" else 64), row


@pytest.mark.slow
def test_the_backward_past_a_frozen_adapter_fits_on_a_card(tmp_path: Path) -> None:
    """Where no B is trained Triton keeps the blocks of d in shared memory: three of them took 128 KiB."""
    rows = compiled(89, tmp_path, "one adapter of rank 64")
    frozen = [row for row in rows if row["kernel"] == "grad_kernel" and row["constants"]["NEED_DB"] == "False"]
    assert frozen and all(row["shared"] <= SHARED_KIB[89] * 1024 for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(not SOAK, reason="soak: half a minute of compilations for GPUs that nobody has run it on")
@pytest.mark.parametrize("target", gpu.AMD)
def test_kernels_compile_for_gpus_of_amd_and_fit(target: str, tmp_path: Path) -> None:
    """They were never run there. Products become the matrix instructions that the GPU has."""
    rows = compiled(target, tmp_path)
    found = {row["kernel"] for row in rows}
    products = {
        "down_kernel",
        "up_kernel",
        "grad_kernel",
        "inputs_kernel",
        "attention_forward_kernel",
        "experts_down_kernel",
    }
    assert found >= products | {
        "softmax_gradient_kernel",
        "masked_kernel",
        "rms_forward_kernel",
        "attention_keys_kernel",
    }
    assert not found & {"fused_kernel", "cross_kernel"}
    for row in rows:
        assert row["shared"] <= 64 * 1024 and row["threads"] <= 1024, row
        if row["kernel"] in products and "float32" not in row["case"]:
            assert row["products"] > 0, row


@pytest.mark.soak
@pytest.mark.slow
def test_kernels_without_products_compile_for_gpus_without_bfloat16_and_fit(tmp_path: Path) -> None:
    rows = compiled(75, tmp_path)
    assert {row["kernel"] for row in rows} == {
        "softmax_gradient_kernel", "part_sums_kernel", "part_gradient_kernel", "dropped_kernel", "masked_kernel",
        "rms_forward_kernel", "rms_backward_kernel", "four_bit_kernel",
    }  # fmt: skip
    assert all(row["shared"] <= 64 * 1024 for row in rows)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_places_and_ranks_in_a_group_s_tables_are_multiples_of_16(kind: dict[str, Any]) -> None:
    """As the kernels are told."""
    layers = range(len(kind["ranks"][0]) if kind["ranks"] else 0)
    ranks = [{number: own[layer] for number, own in enumerate(kind["ranks"]) if own[layer]} for layer in layers]
    layout = make_layout(ranks, [37, 20, 66][: len(ranks)], 16)
    factors = dict.fromkeys(layout.places, 1.0)
    tables = make_group_tables(layout, factors, torch.device("cpu"))
    for table in (tables.rows, *tables.places):
        assert (table % 16 == 0).all()
    assert layout.width % 16 == 0


@pytest.mark.parametrize("block", row_norm_tables.SIZES)
def test_places_and_ranks_in_a_batch_of_norms_are_aligned(block: int) -> None:
    """As the kernels are told: first ranks are multiples of their block, places in buffers of 16."""
    shapes = [
        (70, 515, block),
        (33, 96, max(1, block - 3)),
        (5, 40, 2 * block if block == 128 else 1),
        (64, 4112, block),
    ]
    items = row_norm_tables.make_items(shapes, block, True, torch.device("cpu"))
    for at in items.offsets:
        assert all(at[name] % 16 == 0 for name in ("split", "inverses", "gram", "G", "R", "Kp")), at
    wide = block > row_norm_tables.WIDE
    gram = block if wide else min(row_norm_tables.GRAM_R, block)
    tail = row_norm_tables.WIDE_TAIL_R if wide else gram
    fold = row_norm_tables.WIDE_FOLD_R if wide else gram
    tables = items.tables
    assert (tables["gram"][:, 1:3] % gram == 0).all()
    assert (tables["fold"][:, 1:3] % fold == 0).all()
    assert (tables["cross"][:, 2] % row_norm_tables.SIZES[block].r == 0).all()
    assert (tables["cross"][:, 3] % row_norm_tables.SIZES[block].k == 0).all()
    assert (tables["tail"][:, 2] % tail == 0).all()
    assert (tables["bits"][:, 2] % row_norm_tables.FINGERPRINT == 0).all()


@pytest.mark.parametrize(
    ("T", "N", "columns"),
    [(8192, 4096, 256), (2048, 4096, 256), (2048, 5120, 128), (2048, 8192, 256), (2048, 3072, 128), (100, 64, 128)],
)
def test_tiles_of_the_fused_product_take_the_fewest_turns(T: int, N: int, columns: int) -> None:
    """Of the 132 processors of an H200: 320 wide tiles of 5120 columns would take three."""
    assert sizes.tile_of(T, N, 132)[0] == columns


def test_tensor_descriptors_are_for_gpus_that_have_the_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, expected in (((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)):
        monkeypatch.setattr("packlora.ops.gpu.capability", lambda device, found=capability: found)
        assert sizes.described(torch.zeros(64, 64, dtype=torch.float16), 64) == expected
