"""The `packlora` command: argument handling and nothing else.

Exit codes: 0 done, 1 a job failed (the others finished), memory ran out or a disk is full, 2 bad input (before any training),
128 + n stopped by signal n.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import packlora
from packlora.errors import InputError, ProcessError, WriteError, unwritten
from packlora.terminal import say, settle

app = typer.Typer(
    name="packlora",
    help="Train one or many LoRA / DoRA adapters on one frozen language model, all at once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a key, e.g. jobs.0.train.learning_rate=1e-4. May be repeated."
    ),
]


def _guarded(action: Callable[[], Any], stopped: str = "stopped") -> Any:
    """Run an action. Bad input becomes a message on stderr and exit code 2, what cannot be written one and exit code 1.

    stopped: what to say after Ctrl-C.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if _loads() and speaks():
        say("loading PyTorch and Transformers")
    try:
        return action()
    except InputError as error:
        if speaks():  # all processes of a run found it
            say(str(error))
        code = 2
    except ProcessError as error:
        if error.is_news:
            say(str(error))
        code = 1
    except (MemoryError, WriteError) as error:
        say(str(error) or "this machine's memory is used up; take a smaller model or less data, or end other programs")
        code = 1
    except KeyboardInterrupt:
        if speaks():  # torchrun tells all processes of it
            say(stopped)
        code = 130
    except Exception as error:
        reason = unwritten(error)
        if reason is None and not isinstance(error, OSError):
            raise
        if not isinstance(error, BrokenPipeError):  # the reader has seen enough
            say(f"cannot write: {reason}" if reason else str(error))
        code = 1
    finally:
        settle()
    raise typer.Exit(code) from None


def _loads() -> bool:
    """Whether the libraries that take seconds to load are yet to come."""
    return "torch" not in sys.modules


def alone() -> bool:
    """Whether this is the run's only process; torchrun starts several."""
    return int(os.environ.get("WORLD_SIZE", "1")) == 1


def speaks() -> bool:
    """Whether this process speaks for the run: the first one does."""
    return os.environ.get("RANK", "0") == "0"


def again(words: list[str]) -> str:
    """The command line that resumes a run; of one on several nodes without what torchrun was told."""
    if alone():
        return shlex.join(["packlora", *words, "--resume"])
    here = os.environ.get("LOCAL_WORLD_SIZE")
    one_node = here == os.environ["WORLD_SIZE"]
    options = f"--standalone --nproc-per-node {here}" if one_node else "..."
    return f"torchrun {options} -m packlora {shlex.join([*words, '--resume'])}"


def _without_resume(words: list[str]) -> list[str]:
    """A command line without --resume and --from."""
    out, before = [], ""
    for word in words:
        if before != "--from" and word not in ("--resume", "--from") and not word.startswith("--from="):
            out.append(word)
        before = word
    return out


@app.command()
def train(
    run: RunFile,
    overrides: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in output_dir.")] = False,
    resume_from: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="[JOB=]STEP",
            help="With --resume: go on from this checkpoint instead of the newest. May be repeated.",
        ),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Stop every job after this many optimizer steps.")
    ] = None,
) -> None:
    """Train all jobs of a run file together."""

    def action() -> None:
        from packlora.run_file import load_run

        # first: a slip is refused before what takes seconds is loaded; several processes find it together
        config = load_run(run, overrides) if alone() else run
        first = _loads() and speaks()
        from packlora.report.summary import print_summary
        from packlora.runtime.run import train as train_run

        if first:
            say("checking the run, reading its data and loading the base model")
        changes = None if alone() else overrides
        result = train_run(config, overrides=changes, resume=resume, max_steps=max_steps, resume_from=resume_from)
        if speaks():
            print_summary(result, again(_without_resume(sys.argv[1:])))
        raise typer.Exit(result.exit_code)

    _guarded(action, "stopped at once; --resume continues from the last checkpoints")


RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The output folder of a run that trains now.")]


@app.command()
def add(
    run_dir: RunDir,
    jobs: Annotated[Path, typer.Argument(metavar="JOBS.yaml", help="A file with jobs: alone, as in a run file.")],
    overrides: Set = None,
) -> None:
    """Let more jobs join a run that trains now."""

    def action() -> None:
        from packlora.commands.control import add_jobs

        print(add_jobs(run_dir, jobs, overrides), flush=True)

    _guarded(action)


@app.command()
def stop(run_dir: RunDir, job: Annotated[str, typer.Argument(metavar="JOB", help="Its name.")]) -> None:
    """End one job of a run that trains now, with its adapter saved; the others go on."""

    def action() -> None:
        from packlora.commands.control import stop_job

        print(stop_job(run_dir, job), flush=True)

    _guarded(action)


@app.command()
def clone(
    run_dir: RunDir,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job whose settings are taken.")],
    name: Annotated[str, typer.Argument(metavar="NEW_NAME", help="Of the new job.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the job, e.g. train.learning_rate=1e-4; repeatable."),
    ] = None,
    weights: Annotated[bool, typer.Option("--from-weights", help="Begin with the job's present adapter.")] = False,
) -> None:
    """Let a job join a run that trains now which differs from another in some keys."""

    def action() -> None:
        from packlora.commands.control import clone_job

        print(clone_job(run_dir, job, name, overrides, weights), flush=True)

    _guarded(action)


@app.command()
def plan(
    run: RunFile,
    overrides: Set = None,
    stages: Annotated[int, typer.Option(min=1, help="Plan for a pipeline of so many devices.")] = 1,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Also show how jobs and microbatches spread over so many devices.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write all figures.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the simulated timeline (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Show what a run would do, without training: samples, microbatches, predicted time and memory."""

    def action() -> None:
        from packlora.run_file import load_run

        config = load_run(run, overrides)
        from packlora.commands.plan import print_plan

        print_plan(config, stages, json_file, plot, gpus)

    _guarded(action)


@app.command()
def tune(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN.yaml", help="The run file; without one, usual layers.")
    ] = None,
    overrides: Set = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="Measure for so long at most; another call goes on with what is left.")
    ] = 5.0,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Also plans that merge weights, which only runs with plans.lossy use.")
    ] = False,
) -> None:
    """Measure the ways to compute a layer on this device now, and remember the fastest."""

    def action() -> None:
        from packlora.run_file import load_run

        if run is None and overrides:
            raise InputError("--set changes keys of a run file, and none was given")
        config = load_run(run, overrides) if run else None
        from packlora.commands.tune import tune as measure_plans

        tuned = measure_plans(config, minutes=minutes, lossy=lossy)
        raise typer.Exit(0 if all(item.plan for item in tuned) else 1)

    _guarded(action, "stopped; what was measured is remembered, and the same command goes on with the rest")


@app.command()
def bench(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="layer, multi, graphs, model, dora, schedule; under torchrun replicas, tensor-parallel.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The JSON file to write.")],
    quick: Annotated[bool, typer.Option("--quick", help="A subset in seconds.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:<number>.")] = "auto",
    only: Annotated[str | None, typer.Option(help="Contenders, packlora:PLAN, words of cases; commas between.")] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="model, dora, replicas, tensor-parallel: shrink models to so many layers.")
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(
            help="model: lora, dora, layers. dora: norm, compose, layer, multi, model, paper-model, quality. replicas: "
            "jobs, fsdp2. Only these are measured; rows of other parts stay in FILE."
        ),
    ] = None,
    shape: Annotated[str | None, typer.Option(help="replicas: 0.6B, 1.7B or 8B.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run that was ended left off.")] = False,
    plots: Annotated[bool, typer.Option("--plots", help="Also write pictures beside FILE.")] = False,
    ncu: Annotated[bool, typer.Option("--ncu", help="layer: print the command lines that count DRAM traffic.")] = False,
) -> None:
    """Measure packlora against the frozen model and PEFT."""

    def action() -> None:
        from packlora.bench.run import run_bench

        raise typer.Exit(run_bench(name, out, quick, device, only, layers, plots, ncu, parts, resume, shape))

    _guarded(action, "stopped; --resume goes on where it was")


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER_DIR", help="A PEFT adapter folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the merged model to; must not exist.")],
    base_model: Annotated[
        str | None,
        typer.Option(help="Base model, where the one named in adapter_config.json is not the place to load from."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the merged weights: auto (as the base), float32, bfloat16, float16.")
    ] = "auto",
) -> None:
    """Fold an adapter into its base model's weights and save a plain Hugging Face model."""

    def action() -> None:
        from packlora.commands.merge import merge_adapter

        if note := merge_adapter(adapter, out, base_model, dtype):
            say(f"note: {note}")
        print(f"merged model: {out}", flush=True)

    _guarded(action)


@app.command()
def doctor() -> None:
    """Show versions and devices, and what of packlora is usable here and what is not, and why."""

    def action() -> None:
        from packlora.commands.doctor import print_doctor

        raise typer.Exit(0 if print_doctor() else 1)

    _guarded(action)


@app.command()
def demo(
    output_dir: Annotated[
        Path, typer.Option(help="Folder of the run; where one is finished already, a numbered one beside it.")
    ] = Path("runs/demo"),
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Stop every job after this many optimizer steps.")
    ] = None,
) -> None:
    """Train four adapters on three real data sets with a real small model, and show what they learnt."""

    def action() -> None:
        from packlora.commands.demo import run_demo

        raise typer.Exit(run_demo(output_dir, max_steps))

    _guarded(action, "stopped at once; the same command continues from the last checkpoints")


def _version(value: bool) -> None:
    if value:
        print(packlora.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """packlora: fast LoRA / DoRA fine-tuning of many adapters at once."""
