"""The `packlora` command: argument handling and nothing else.

Exit codes: 0 done, 1 a job failed (the others finished), memory ran out or a disk is full, 2 bad input (before any training),
128 + n stopped by signal n.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

import packlora
from packlora.command_line import App, RunFile, Set, again, alone, loading, loads, speaks, without_resume
from packlora.errors import InputError
from packlora.serve_command import app as serve
from packlora.terminal import say, show, tame_streams

app = App(
    name="packlora",
    help="Train one or many LoRA / DoRA adapters on one frozen language model, all at once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(serve)

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The output folder of a run that trains now.")]
MaxSteps = Annotated[int | None, typer.Option(min=1, help="Stop every job after this many optimizer steps.")]
BaseModel = Annotated[
    str | None, typer.Option(help="Base model, where the one that the adapter names is not the place to load from.")
]


@app.command(stopped="stopped at once; --resume continues from the last checkpoints", light=True)
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
    max_steps: MaxSteps = None,
) -> None:
    """Train all jobs of a run file together."""
    if first := loads() and speaks():
        say(f"reading {run} and its data")
    from packlora.data.reader import Reader

    reader, config = Reader(), cast(Any, run)
    if alone():  # first: a slip is refused before what takes seconds is loaded; several processes find it together
        from packlora.run_file import load_run
        from packlora.runtime.early import read_early

        config, overrides = load_run(run, overrides), None
        reader = read_early(config, resume)
    if first:
        say("loading PyTorch and Transformers")
    with loading():
        from packlora.report.summary import print_summary
        from packlora.runtime.run import train_read

    if first:
        say(f"checking the run and loading the base model; packlora watch {shlex.quote(str(run))} shows its curves")
    result = train_read(reader, config, overrides, resume, max_steps, resume_from)
    if speaks():
        words = sys.argv[1:]
        print_summary(result, again(without_resume(words)), again(without_resume(words, "--max-steps")))
    raise typer.Exit(result.exit_code)


Watched = Annotated[Path, typer.Argument(metavar="RUN", help="The output folder of a run, or its run file.")]


@app.command(stopped="watching has ended", light=True)
def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Output folders of runs, or their run files.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Serve the page of a run on this machine, with curves that grow while it trains; several runs stand side by side."""
    from packlora.commands.watch import watch as serve

    serve(runs, port, browser)


@app.command(light=True)
def report(run: Watched) -> None:
    """Write report.html of a run again from what is in its folder, also of one that was killed."""
    from packlora.commands.watch import report_again

    show(f"report: {report_again(run)}")


@app.command(light=True)
def add(
    run_dir: RunDir,
    jobs: Annotated[Path, typer.Argument(metavar="JOBS.yaml", help="A file with jobs: alone, as in a run file.")],
    overrides: Set = None,
) -> None:
    """Let more jobs join a run that trains now."""
    from packlora.commands.control import add_jobs

    show(add_jobs(run_dir, jobs, overrides))


@app.command(light=True)
def stop(run_dir: RunDir, job: Annotated[str, typer.Argument(metavar="JOB", help="Its name.")]) -> None:
    """End one job of a run that trains now, with its adapter saved; the others go on."""
    from packlora.commands.control import stop_job

    show(stop_job(run_dir, job))


@app.command(light=True)
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
    from packlora.commands.control import clone_job

    show(clone_job(run_dir, job, name, overrides, weights))


@app.command()
def plan(
    run: Annotated[
        Path, typer.Argument(metavar="RUN.yaml|MODEL", help="The run file; with --gpu the folder or name of a model.")
    ],
    overrides: Set = None,
    stages: Annotated[int, typer.Option(min=1, help="Plan for a pipeline of so many devices.")] = 1,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Also show how jobs and microbatches spread over so many devices.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write all figures.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the simulated timeline (.png, .svg, .pdf).")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="MEMORY", help='Of a MODEL: which settings fit on a card of so much, "24 GB".')
    ] = None,
    rank: Annotated[int, typer.Option("--r", min=1, max=2**16, help="With --gpu: rank of the adapter.")] = 16,
    length: Annotated[int, typer.Option(min=2, max=2**24, help="With --gpu: tokens of a sample.")] = 2048,
) -> None:
    """Show what a run would do, without training: samples, microbatches, predicted time and memory."""
    if gpu is not None:
        from packlora.commands.plan_model import print_card

        refused = {"--set": overrides, "--stages": stages > 1, "--gpus": gpus, "--plot": plot}
        return print_card(str(run), gpu, rank, length, json_file, [key for key, value in refused.items() if value])
    from packlora.run_file import load_run

    config = load_run(run, overrides)
    from packlora.commands.plan import print_plan

    print_plan(config, stages, json_file, plot, gpus)


@app.command()
def preview(
    run: RunFile,
    overrides: Set = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each job, the first ones.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a sample, a line each.")] = False,
) -> None:
    """Show samples as they are trained on, with what is learnt in colour, or in ⟦marks⟧ without a terminal or colours.

    It counts tokens, and says what is cut or left out and why. A row that training would refuse is refused. Of the base model
    it needs config.json and a tokenizer alone.
    """
    from packlora.run_file import load_run

    config = load_run(run, overrides)
    with loading():
        from packlora.commands.preview import print_preview

    print_preview(config, rows, as_json)


@app.command(stopped="stopped; what was measured is remembered, and the same command goes on with the rest")
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
    """Measure the kernels' sizes and the ways to compute a layer on this device now, and remember the fastest."""
    from packlora.run_file import load_run

    if run is None and overrides:
        raise InputError("--set changes keys of a run file, and none was given")
    config = load_run(run, overrides) if run else None
    from packlora.tune.plans import tune as measure_plans

    tuned = measure_plans(config, minutes=minutes, lossy=lossy)
    raise typer.Exit(0 if all(item.plan for item in tuned) else 1)


CheckOption = Annotated[
    str,
    typer.Option(
        "--check",
        help="Load what is written as programs that serve do, and compare its logits with the adapter's: always, never; auto: "
        "of models up to 2 billion parameters.",
    ),
]


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER_DIR", help="A PEFT adapter folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the merged model to; must not exist.")],
    base_model: BaseModel = None,
    dtype: Annotated[
        str, typer.Option(help="Of the merged weights: auto (as the base), float32, bfloat16, float16.")
    ] = "auto",
    quantization: Annotated[
        str,
        typer.Option(
            help="Fold into what codes of the base stand for: nf4, fp4, int8; none: into its weights; auto: as it was trained."
        ),
    ] = "auto",
    double_quant: Annotated[
        bool, typer.Option("--double-quant", help="With nf4 or fp4: scales are quantised too.")
    ] = False,
    requantize: Annotated[
        str,
        typer.Option(
            help="Save the merged model in codes, and say how far they are off: nf4, nf4-double, fp4, fp4-double, int8, or "
            "torchao's int4_weight_only, int8_weight_only, float8_weight_only."
        ),
    ] = "none",
    check: CheckOption = "auto",
) -> None:
    """Fold an adapter into its base model's weights and save a plain Hugging Face model."""
    from packlora.export.merge import merge_adapter

    if note := merge_adapter(adapter, out, base_model, dtype, quantization, double_quant, requantize, check):
        say(f"note: {note}")
    show(f"merged model: {out}")


@app.command()
def export(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER_DIR", help="A PEFT adapter folder, as RUN/job.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write, for gguf the file; must not exist.")],
    target: Annotated[
        str, typer.Option("--for", metavar="PROGRAM", help="vllm, sglang, gguf (llama.cpp), ollama or peft.")
    ],
    base_model: BaseModel = None,
    dtype: Annotated[
        str, typer.Option(help="Of the tensors: float32, bfloat16, float16, auto (as the base).")
    ] = "float32",
    check: CheckOption = "auto",
) -> None:
    """Write an adapter as another program reads it, with the same numbers."""
    from packlora.export.export import export_adapter, serve_command

    for note in export_adapter(adapter, out, target, base_model, dtype, check):
        say(f"note: {note}")
    show(f"adapter for {target}: {out}")
    if (command := serve_command(out, target)) is not None:
        show(f"serve it: {command}")


Adapter = Annotated[Path, typer.Argument(metavar="RUN/JOB", help="A finished adapter or a checkpoint.")]
Dtype = Annotated[
    str, typer.Option(help="Of the base model: auto (as the run that trained it), float32, bfloat16, float16.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:<number>.")]
System = Annotated[str | None, typer.Option(help="A message of the system at the beginning.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(min=0, max=100, help="0 takes the likeliest token each time.")]
Seed = Annotated[int, typer.Option(min=0, help="Of tokens that are drawn.")]
Image = Annotated[
    list[str] | None,
    typer.Option("--image", metavar="FILE", help="Shown with the prompt, by models that see images. May be repeated."),
]


@app.command()
def generate(
    adapter: Adapter,
    prompt: Annotated[str | None, typer.Option(help="What is asked; without it, standard input is read.")] = None,
    system: System = None,
    image: Image = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on from the prompt as plain text, without chat template.")
    ] = False,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    base_model: BaseModel = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Let an adapter answer a prompt."""
    from packlora.answers.talk import Sampling, generate

    said, how = sys.stdin.read() if prompt is None else prompt, Sampling(max_new_tokens, temperature, seed)
    show(generate(adapter, said, system, raw, how, base_model, dtype, device, image or []))


@app.command()
def chat(
    adapters: Annotated[list[Path], typer.Argument(metavar="RUN/JOB...", help="Adapters of one base model.")],
    with_base: Annotated[bool, typer.Option("--with-base", help="The base model answers too.")] = False,
    system: System = None,
    image: Image = None,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    base_model: BaseModel = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Talk to one or several adapters side by side: each line of standard input is a turn."""
    from packlora.answers.talk import Sampling, chat

    how = Sampling(max_new_tokens, temperature, seed)
    chat(adapters, with_base, system, how, base_model, dtype, device, images=image or [])


@app.command("eval")
def evaluate(
    adapter: Adapter,
    data: Annotated[str, typer.Argument(metavar="DATA", help="Held-out samples, as data.path of a run file.")],
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Longest sample in tokens; default is that of its run.")
    ] = None,
    truncate: Annotated[
        str | None, typer.Option(help="error, drop or right: what to do with longer ones; default is that of its run.")
    ] = None,
    base_model: BaseModel = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Show the held-out loss of an adapter on a data file, computed as training computes it."""
    from math import exp

    from packlora.commands.held_out import evaluate_adapter

    found = evaluate_adapter(adapter, data, max_length, truncate, base_model, dtype, device)
    for note in found.notes:
        say(f"note: {note}")
    show(f"loss        {found.loss:.6f}\nperplexity  {exp(min(found.loss, 700)):.4f}")
    show(f"labels      {found.label_tokens:,} of {found.tokens:,} tokens, {found.samples:,} samples")


@app.command()
def doctor() -> None:
    """Show versions and devices, and what of packlora is usable here and what is not, and why."""
    from packlora.commands.doctor import print_doctor

    raise typer.Exit(0 if print_doctor() else 1)


@app.command(stopped="stopped at once; the same command continues from the last checkpoints")
def demo(
    output_dir: Annotated[
        Path, typer.Option(help="Folder of the run; where one is finished already, a numbered one beside it.")
    ] = Path("runs/demo"),
    max_steps: MaxSteps = None,
) -> None:
    """Train four adapters on three real data sets with a real small model, and show what they learnt."""
    with loading():
        from packlora.commands.demo import run_demo

    raise typer.Exit(run_demo(output_dir, max_steps))


@app.command(light=True)
def init(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A data file, as data.path of a run file.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="RUN.yaml", help="The file to write; must not exist.")
    ] = Path("run.yaml"),
    base_model: Annotated[str, typer.Option(help="A folder or a Hugging Face model id.")] = "smollm2-135m",
) -> None:
    """Write a run file with comments from a data file."""
    from packlora.commands.init import write_run_file

    show(write_run_file(data, out, base_model))
    file = shlex.quote(str(out))
    show(f"{out}: read it, then `packlora train {file}`; `packlora plan {file}` shows what it would do")


@app.command(light=True)
def schema() -> None:
    """Print the JSON schema of the run file, for editors."""
    import json

    from packlora.commands.schema import run_file_schema

    show(json.dumps(run_file_schema(), indent=2))


def _version(value: bool) -> None:
    if value:
        show(packlora.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """packlora: fast LoRA / DoRA fine-tuning of many adapters at once."""


def command() -> None:
    """The `packlora` command, in a process of its own."""
    tame_streams()
    app()
