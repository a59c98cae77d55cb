"""`packlora demo`: train examples/demo.yaml, then let the adapters answer a held-out prompt before and after.

Its run file and data are those of a checkout, or of an installed package.
"""

from __future__ import annotations

import itertools
import json
import textwrap
from pathlib import Path

from rich.text import Text

from packlora.answers.talk import BASE, Sampling, load_speakers
from packlora.config import Run
from packlora.data.readers import read_rows
from packlora.errors import InputError
from packlora.report.screen import Screen
from packlora.report.summary import print_summary
from packlora.result import Result
from packlora.run_file import load_run
from packlora.runtime.run import train

EXAMPLE = Path("examples", "demo.yaml")
CHECKOUT, PACKAGE = Path(__file__).resolve().parents[2], Path(__file__).resolve().parents[1]
NEW_TOKENS = 32


def run_demo(output_dir: Path, max_steps: int | None = None) -> int:
    """Train, summarise, show samples; returns the exit code.

    Raises:
        InputError: the run file is not there, or output_dir holds something that is not a run of the demo.
    """
    found = [folder / EXAMPLE for folder in (CHECKOUT, Path.cwd(), PACKAGE) if (folder / EXAMPLE).exists()]
    if not found:
        raise InputError(f"{EXAMPLE} is not here: it and the data are in a checkout of packlora, and in its wheel")
    run, resume = _place(found[0], output_dir)
    result = train(run, resume=resume, max_steps=max_steps)
    print_summary(result, "the same command")
    if result.exit_code == 0:
        show_samples(run, result)
        Screen().print(Text(f"\nThe whole story: {result.report}"), soft_wrap=True)
    return result.exit_code


def _place(run_file: Path, output_dir: Path) -> tuple[Run, bool]:
    """The demo in output_dir, or in output_dir-2, -3, ... where runs are finished already; resumed if one was interrupted."""
    for number in itertools.count(1):
        folder = output_dir if number == 1 else output_dir.with_name(f"{output_dir.name}-{number}")
        run = load_run(run_file, [f"output_dir={json.dumps(str(folder))}"])
        try:
            record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            finished = bool(record["result"]) and record["result"]["status"] != "interrupted"
        except FileNotFoundError:
            return run, False
        except (OSError, ValueError, RecursionError, LookupError, TypeError):  # going on tells what is wrong with it
            return run, True
        if not finished:
            return run, True
    raise AssertionError("unreachable")


def show_samples(run: Run, result: Result) -> None:
    """Print one held-out prompt per job with the expected answer, the base model's and the adapter's."""
    console, how = Screen(), Sampling(NEW_TOKENS)
    speakers = load_speakers([result.jobs[job.name].folder for job in run.jobs], run.base_model, "auto", run.device)
    for job in run.jobs:
        row = read_rows((job.data.eval_paths or [job.data.sources[0][0]])[0], job.name)[0]
        messages = [{"role": "user", "content": str(row.prompt)}]
        questions = [speakers.question(name, messages, how) for name in (BASE, job.name)]
        before, after = speakers.answers(questions)
        console.print(Text(f"\n{job.name}", style="bold"))
        question = textwrap.shorten(str(row.prompt), 160, placeholder=" ...")
        for label, text in (("prompt", question), ("wanted", row.completion), ("before", before), ("after", after)):
            console.print(Text(f"  {label}: ", style="dim") + Text(textwrap.shorten(str(text), 200)), soft_wrap=True)
