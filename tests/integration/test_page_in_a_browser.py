"""The page of a small real run in a real browser: what a person can do with it, live, and what hostile names cannot.

One test, since a browser and a run cost seconds: its parts share both, and each begins with the page anew.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageColor

import packlora
from packlora.commands.watch import Server
from packlora.report import charts
from packlora.report.report import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright, which drives the browser, is not installed")
BROWSERS = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser")
HOSTILE = """</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">'"&amp;<!--"""
PATHS = "all => all.map(e => ({job: e.dataset.job, d: e.getAttribute('d')}))"
JOBS = ("alpha", "beta", "gamma")


@pytest.fixture
def out(tiny_base: Callable[[str], str], write_rows: Callable[..., str], tmp_path: Path) -> Path:
    held = write_rows("held", 4, 9)

    def job(name: str, seed: int) -> dict[str, Any]:
        data = {"path": write_rows(name, 12, seed), "eval_path": held}
        train = {"max_steps": 6 + 2 * seed, "learning_rate": 0.01 * (seed + 1), "global_batch_size": 2}
        return {"name": name, "data": data, "adapter": {"r": 2 + 9 * seed}, "train": train}

    folder = tmp_path / "out"
    packlora.train(
        {
            "base_model": tiny_base("llama"), "output_dir": str(folder), "max_tokens_per_microbatch": 64, "eval_every": 4,
            "device": "cpu", "sample_prompts": [HOSTILE, "dog"], "sample_max_new_tokens": 3,
            "jobs": [job(name, seed) for seed, name in enumerate(JOBS)],
        }
    )  # fmt: skip
    run = json.loads((folder / "run.json").read_text())  # as somebody writes it who means harm
    run["config"]["jobs"].append({**run["config"]["jobs"][0], "name": HOSTILE})
    run["jobs"][HOSTILE] = run["jobs"]["alpha"]
    run["warnings"].append(HOSTILE)
    (folder / "run.json").write_text(json.dumps(run))
    append(
        folder, [{"job": HOSTILE, "step": n, "loss": 3.0, HOSTILE: 1.0, "elapsed": n, "tokens": 5} for n in (1, 2, 3)]
    )
    return folder


def append(folder: Path, lines: list[dict[str, Any]]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def browser() -> Iterator[Any]:
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"there is no browser: {', '.join(BROWSERS)}")
    with sync_api.sync_playwright() as tool:
        opened = tool.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


class Page:
    """The page in the browser, and what the parts of the test ask of it."""

    def __init__(self, browser: Any, url: str, width: int = 1400) -> None:
        self.complaints: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.goto(url)
        self.page.wait_for_selector("[data-chart=curves] path.bold")

    def end(self) -> None:
        assert self.complaints == []
        assert self.page.evaluate("window.hacked") is None
        assert self.page.locator("img").count() == 0
        self.page.close()

    def lines(self, kind: str = "line", chart: str = "curves") -> dict[str, str]:
        """Drawn paths by the number of the job."""
        found = self.page.locator(f"[data-chart={chart}] figure >> nth=0").locator(
            f"path.mark[data-kind={kind}]:not(.ring)"
        )
        return {one["job"]: one["d"] for one in found.evaluate_all(PATHS)}

    def ticks(self, axis: str) -> list[str]:
        anchor = {"x": "middle", "y": "end"}[axis]
        return self.page.locator(f"[data-chart=curves] .axes text[text-anchor={anchor}]").all_text_contents()

    def canvas(self) -> Any:
        return self.page.locator("[data-chart=curves] .canvas")

    def drag(self, start: tuple[float, float], stop: tuple[float, float]) -> None:
        """Over shares of the chart."""
        box = self.canvas().bounding_box()
        places = [(box["x"] + box["width"] * x, box["y"] + box["height"] * y) for x, y in (start, stop)]
        self.page.mouse.move(*places[0])
        self.page.mouse.down()
        self.page.mouse.move(*places[1], steps=3)
        self.page.mouse.up()


def test_the_page_of_a_run_in_a_browser(out: Path, browser: Any) -> None:
    for look in (
        jobs_are_toggled_and_shown_alone,
        the_axes_change,
        a_drag_zooms,
        values_are_shown,
        a_chart_is_taken_away,
        the_table_is_sorted,
    ):
        page = Page(browser, write_report(out).as_uri())
        look(page)
        page.end()
    on_a_telephone(browser, write_report(out).as_uri())
    runs_stand_side_by_side(browser, out)
    with Server([out], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        page = Page(browser, server.url)
        it_grows_with_the_run(page, out)
        texts_of_users_stay_texts(page)
        server.shutdown()
        page.end()
        thread.join()


def jobs_are_toggled_and_shown_alone(page: Page) -> None:
    assert set(page.lines()) == {"0", "1", "2", "3"} and set(page.lines("held-out")) == {"0", "1", "2"}
    button = page.page.get_by_role("button", name="beta", exact=True)
    button.click()
    assert set(page.lines()) == {"0", "2", "3"} and set(page.lines("held-out")) == {"0", "2"}
    assert button.get_attribute("aria-pressed") == "false" and "off" in page.page.locator("#job-1").get_attribute(
        "class"
    )
    assert "1" not in page.lines(chart="machine")
    button.click()
    assert "1" in page.lines()
    button.dblclick()
    assert set(page.lines()) == {"1"}
    button.dblclick()
    assert len(page.lines()) == 4
    button.dblclick()
    page.page.get_by_role("button", name="all", exact=True).click()
    assert len(page.lines()) == 4


def the_axes_change(page: Page) -> None:
    plain, ticks = page.lines(), page.ticks("y")
    page.page.get_by_label("log axis").check()
    assert page.lines() != plain and page.ticks("y") != ticks
    page.page.get_by_label("log axis").uncheck()
    assert page.lines() == plain
    raw = page.lines("raw")
    page.page.get_by_label("Smoothing").fill("0")
    assert page.lines("raw") == {} and page.lines()["2"].count("L") == raw["2"].count("L")
    page.page.get_by_label("Smoothing").fill("30")
    heights = [float(pair.split(",")[1]) for pair in page.lines()["2"].replace("M", "").split("L")]
    rough = [float(pair.split(",")[1]) for pair in page.lines("raw")["2"].replace("M", "").split("L")]
    assert len(heights) == len(rough) == 10 and bends(heights) < 0.8 * bends(rough)
    choice = page.page.get_by_label("Metric")
    assert choice.input_value() == "loss"
    assert {"grad_norm", "lr", "tokens_per_second", HOSTILE} <= {
        one.get_attribute("value") for one in choice.locator("option").all()
    }
    choice.select_option(HOSTILE)  # a number that only one job records
    assert set(page.lines()) == {"3"}
    choice.select_option("lr")
    page.page.get_by_label("Horizontal axis").select_option("seen")
    assert (
        set(page.lines()) == {"0", "1", "2"}
        and "tokens trained on" in page.page.locator("[data-chart=curves]").inner_text()
    )


def bends(values: list[float]) -> float:
    return sum(abs(values[n - 1] - 2 * values[n] + values[n + 1]) for n in range(1, len(values) - 1))


def a_drag_zooms(page: Page) -> None:
    whole = page.ticks("x")
    page.drag((0.3, 0.5), (0.6, 0.52))
    zoomed = page.ticks("x")
    assert float(zoomed[0]) > 0 and float(zoomed[-1]) < float(whole[-1])
    beside = page.page.locator("[data-chart=optimization] figure >> nth=0").locator("text[text-anchor=middle]")
    assert float(beside.first.text_content()) > 0  # charts of one axis show one stretch
    page.page.get_by_role("button", name="whole range").first.click()
    assert page.ticks("x") == whole
    high = page.ticks("y")
    page.drag((0.5, 0.3), (0.503, 0.7))
    assert page.ticks("x") == whole and page.ticks("y") != high
    page.canvas().dblclick()
    assert (page.ticks("x"), page.ticks("y")) == (whole, high)


def values_are_shown(page: Page) -> None:
    box = page.canvas().bounding_box()
    page.page.mouse.move(box["x"] + box["width"] * 0.22, box["y"] + 100)
    tip = page.page.locator("[data-chart=curves] .tip")
    rows = {
        row.get_attribute("data-job"): [cell.strip() for cell in row.inner_text().split("\t")]
        for row in tip.locator("tbody tr").all()
    }
    assert set(rows) == {"0", "1", "2", "3"} and rows["3"][0] == HOSTILE
    (step,) = [int(word) for word in tip.locator("th").first.inner_text().split() if word.isdigit()]
    metrics = [json.loads(line) for line in (page_folder(page) / "metrics.jsonl").read_text().splitlines()]
    for index, name in enumerate(JOBS):
        (loss,) = [line["loss"] for line in metrics if line["job"] == name and line["step"] == step]
        assert f"{loss:.4f}" == rows[str(index)][2]
    page.page.mouse.move(5, 5)
    assert tip.is_hidden()


def a_chart_is_taken_away(page: Page) -> None:
    chart = page.page.locator("[data-chart=curves] figure >> nth=0")

    def taken(kind: str) -> bytes:
        with page.page.expect_download() as waited:
            chart.get_by_role("button", name=kind).click()
        assert waited.value.suggested_filename == f"out-Loss.{kind.lower()}"
        return Path(waited.value.path()).read_bytes()

    metrics = [json.loads(line) for line in (page_folder(page) / "metrics.jsonl").read_text().splitlines()]
    head, *rows = csv.reader(io.StringIO(taken("CSV").decode()))
    assert head == ["line", "kind", "step", "Loss", "lowest", "highest"]
    found = {(name, float(step)): float(loss) for name, kind, step, loss, *_ in rows if not kind}
    assert found == {(line["job"], line["step"]): pytest.approx(line["loss"], rel=1e-5) for line in metrics}
    assert {kind for _, kind, *_ in rows} == {"", "held-out"}
    picture = Image.open(io.BytesIO(taken("PNG"))).convert("RGB")
    width = page.canvas().bounding_box()["width"]
    assert picture.width == 2 * int(width) and picture.height > 800
    inks = {ImageColor.getrgb(charts.colour(number, "light")) for number in range(4)}
    assert inks <= {colour for _, colour in picture.getcolors(2**24)}


def page_folder(page: Page) -> Path:
    return Path(page.page.url.removeprefix("file://")).parent


def the_table_is_sorted(page: Page) -> None:
    def order() -> list[str]:
        return page.page.locator("[data-part=jobs] tbody tr").evaluate_all("rows => rows.map(row => row.dataset.key)")

    head = page.page.locator("[data-part=jobs] thead button")
    head.get_by_text("r", exact=True).click()
    assert order() == ["alpha", HOSTILE, "beta", "gamma"]  # ranks 2, 2, 11, 20: as numbers
    head.get_by_text("r", exact=True).click()
    assert order()[:2] == ["gamma", "beta"]
    head.get_by_text("Job", exact=True).click()
    assert order() == sorted(order())


def on_a_telephone(browser: Any, url: str) -> None:
    page = Page(browser, url, 400)
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 400
    page.page.get_by_label("Sort jobs by").select_option("2")
    assert page.page.locator("[data-part=jobs] tbody tr").first.get_attribute("data-key") == "alpha"
    page.end()


def runs_stand_side_by_side(browser: Any, out: Path) -> None:
    """All jobs in one page, losses of another kind in a chart of their own, and a link to the page of each run."""
    other = out.parent / "other"
    shutil.copytree(out, other)
    record = json.loads((other / "run.json").read_text())
    record["config"]["jobs"][1]["train"]["trainer"] = "dpo"
    (other / "run.json").write_text(json.dumps(record))
    with Server([out, other], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        page = Page(browser, server.url)
        figures = page.page.locator("[data-chart=curves] figure:visible")
        drawn = [
            {one["job"] for one in figure.locator("path.mark[data-kind=line]").evaluate_all(PATHS)}
            for figure in figures.all()
        ]
        assert drawn == [{"0", "1", "2", "3", "4", "6", "7"}, {"5"}]
        assert figures.locator("figcaption b").all_text_contents() == ["SFT loss", "DPO loss"]
        assert "nats per pair" in figures.nth(1).inner_text()
        page.page.get_by_role("button", name="other / beta", exact=True).click()
        assert figures.locator("figcaption b").all_text_contents() == ["Loss"]
        page.page.get_by_role("link", name="other").click()
        page.page.wait_for_selector("[data-chart=curves] path.bold")
        assert page.page.title().startswith("other · ")
        page.end()
        server.shutdown()
        thread.join()


def it_grows_with_the_run(page: Page, out: Path) -> None:
    """New lines reach curves and table, and what a person has set stays."""
    page.page.get_by_role("button", name="beta", exact=True).click()
    page.page.locator("[data-part=jobs] thead button").get_by_text("Job", exact=True).click()
    page.page.locator("[data-part=jobs] thead button").get_by_text("Job", exact=True).click()
    before = page.lines()["2"].count("L")
    more = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.01, "tokens": 1000, "seconds": 1.0}
    append(
        out,
        [{"job": "gamma", "step": 10 + n, "elapsed": 100.0 + n, "rewards/margins": 0.5, **more} for n in range(1, 8)],
    )
    page.page.wait_for_function(
        "count => (document.querySelector('[data-chart=curves] path.mark[data-job=\"2\"][data-kind=line]')"
        ".getAttribute('d').match(/L/g) || []).length === count",
        arg=before + 7, timeout=300_000,
    )  # fmt: skip
    page.page.locator("#job-2").get_by_text("17 / 10").wait_for(timeout=300_000)  # tables follow, less often
    assert set(page.lines()) == {"0", "2", "3"}
    assert page.page.locator("[data-part=jobs] tbody tr").first.get_attribute("data-key") == "gamma"
    assert page.page.get_by_label("Metric").locator("option[value='rewards/margins']").count() == 1
    assert "up to date" in page.page.locator(".live").inner_text()


def texts_of_users_stay_texts(page: Page) -> None:
    whole = page.page.locator("body").inner_text()
    assert whole.count(HOSTILE) >= 4  # in the legend, the table, a warning, the prompt
    asked = page.page.locator(".samples blockquote").all_text_contents()
    assert asked == [HOSTILE, "dog"]
    written = [json.loads(line) for line in (Path(page_samples(page))).read_text().splitlines()]
    last = {line["job"]: line["samples"][1]["text"] for line in written}
    shown = page.page.locator(".samples article >> nth=1").locator(".answer")
    assert {one.locator(".name").inner_text(): one.locator(".text").text_content() for one in shown.all()} == {
        name: last[name] or "(nothing)" for name in ("alpha", "gamma")
    }


def page_samples(page: Page) -> str:
    """Of the run that the page shows."""
    details = page.page.locator("[data-part=reproducibility] pre").text_content()
    (folder,) = [line.partition(": ")[2] for line in details.splitlines() if line.startswith("output_dir:")]
    return f"{folder}/samples.jsonl"
