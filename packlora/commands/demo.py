"""`packlora demo`: train examples/demo.yaml, then let the adapters answer a held-out prompt before and after.

Its run file and data are those of a checkout, or of an installed package.
"""

from __future__ import annotations

import itertools
import json
import textwrap
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from packlora.adapters.attach import attach
from packlora.adapters.files import load_adapter
from packlora.base.load import load_tokenizer
from packlora.base.model import load_base
from packlora.config import Run
from packlora.data.readers import read_rows
from packlora.data.template import Template
from packlora.errors import InputError
from packlora.report.screen import Screen
from packlora.report.summary import print_summary
from packlora.result import Result
from packlora.run_file import load_run
from packlora.runtime.continued import resolve_folder
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


@torch.no_grad()
def show_samples(run: Run, result: Result) -> None:
    """Print one held-out prompt per job with the expected answer, the base model's and the adapter's."""
    console = Screen()
    base = load_base(run, load_tokenizer(run))
    model: Any = base.model
    model.eval()
    model.set_attn_implementation("sdpa")  # generation keeps a cache and does not pack
    folders = {name: job.folder for name, job in result.jobs.items()}
    specs = {name: resolve_folder(folder, model, name) for name, folder in folders.items()}
    attached, adapters = attach(model, specs, run.seed)
    for job, adapter in zip(run.jobs, adapters, strict=True):
        load_adapter(folders[job.name], adapter)
        row = read_rows((job.data.eval_paths or [job.data.sources[0][0]])[0], job.name)[0]
        before = _answer(model, base.tokenizer, str(row.prompt))
        with attached.only(adapter.number):
            after = _answer(model, base.tokenizer, str(row.prompt))
        console.print(Text(f"\n{job.name}", style="bold"))
        question = textwrap.shorten(str(row.prompt), 160, placeholder=" ...")
        for label, text in (("prompt", question), ("wanted", row.completion), ("before", before), ("after", after)):
            console.print(Text(f"  {label}: ", style="dim") + Text(textwrap.shorten(str(text), 200)), soft_wrap=True)


def _answer(model: Any, tokenizer: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    text = Template(tokenizer).render(messages, generation=True)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(model.device)
    out = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=NEW_TOKENS, do_sample=False,
        temperature=None, top_p=None, top_k=None, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()
