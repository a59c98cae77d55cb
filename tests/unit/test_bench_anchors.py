"""The anchors benchmark: what its table, its rows and its summary hold."""

import pytest

from benchmarks import anchors


def test_summary_names_each_figure_by_case_and_contender():
    rows = [
        {"case": "s8", "contender": "train", "tokens_per_s": 3.0, "gib": 2.0},
        {"case": "s8", "contender": "trainer_peft", "tokens_per_s": 1.0, "gib": 4.0},
        {"case": "dora8", "contender": "trainer_peft", "tokens_per_s": None, "error": "out of memory"},
    ]
    assert anchors.summary_of(rows) == {
        "s8_tokens_per_s": 3.0, "s8_gib": 2.0, "s8_trainer_peft_tokens_per_s": 1.0, "s8_trainer_peft_gib": 4.0
    }  # fmt: skip
    assert all(key.startswith("part_") for key in anchors.summary_of(rows, quick=True))


def test_the_first_steps_are_not_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(anchors, "_train", lambda folder, anchor: ([9.0, 29.0, 31.0, 32.0, 34.0], 1.0))
    anchor = anchors.Anchor("Qwen3-8B", sequence=10, microbatch=2, accumulation=3, steps=5)
    row = anchors.measure(tmp_path, anchor, "train")
    assert (row["steps"], row["step_s"], row["tokens_per_s"]) == (3, 2.0, 30.0)


def test_a_contender_that_fails_says_why_and_has_no_figure(monkeypatch, tmp_path):
    def fails(folder, contender):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(anchors, "_trainer", fails)
    row = anchors.measure(tmp_path, anchors.ANCHORS["dora8"], "trainer_peft")
    assert row["tokens_per_s"] is None
    assert row["error"] == "out of memory"


@pytest.mark.parametrize("name", ["s8", "nemo8"])
def test_a_step_has_the_published_number_of_tokens(name):
    assert anchors.ANCHORS[name].tokens_per_step == {"s8": 16384, "nemo8": 131072}[name]
