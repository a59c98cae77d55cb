"""Everything that can be wrong with a run is found here, before any training: data, tokenizer and targets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from packlora.adapters.kinds import is_of_images
from packlora.adapters.spec import AdapterSpec, resolve
from packlora.adapters.targets import try_patterns
from packlora.base.demo_model import base_path
from packlora.base.device import choose_device, settle_dtype
from packlora.base.held import check_held
from packlora.base.load import load_skeleton, load_tokenizer
from packlora.changes import check_prepared
from packlora.config import JobConfig, Run
from packlora.config.peft import peft_config
from packlora.data.prompts import said_ends, taught_end
from packlora.data.reader import Reader, Rows
from packlora.data.readers import is_there
from packlora.data.template import set_clock, templated
from packlora.engine.optimizer import check_optim
from packlora.errors import InputError, quoted
from packlora.form import check_asked, prepared_form, read_as_floats
from packlora.given import given
from packlora.lora_config import LoraConfig
from packlora.ops.modules import beside_decoder
from packlora.ops.twin import twin_of
from packlora.plans.ask import Ask, asks_of
from packlora.runtime.encoder import Encoder
from packlora.runtime.head_cost import known_head
from packlora.runtime.prepared_job import AUTO_BUDGET, LEFT_OUT, ModelShape, PreparedJob
from packlora.runtime.prepared_run import PreparedRun

if TYPE_CHECKING:
    from packlora.modality import Modality
    from packlora.weight_form import WeightForm

LOOKED_AT = 1000
"""Samples of a job that are looked at for how answers end."""


def prepare(
    run: Run, max_steps: int | None = None, resumed: bool = False, reader: Reader | None = None,
    gone: Mapping[str, str] | None = None, budgets: Mapping[str, int] | None = None, moment: datetime | None = None,
) -> PreparedRun:  # fmt: skip
    """Read, encode and match everything. Raises InputError at the first thing that cannot work.

    Args:
        run: the checked run file.
        max_steps: train no job for more optimizer steps than this.
        resumed: leave out jobs whose data is no longer there, as long as one is left.
        reader: of rows, some of which it may have read already; hears what is being done.
        gone: jobs of a resumed run that take no part any more, and why.
        budgets: of jobs that joined a run whose budget is its own choice, the most tokens of a sample.
        moment: what a chat template sees as now.
    """
    device, reader = _check_device(run), reader or Reader()
    run = import_module("packlora.rl.prepare").undivided(run) if run.generates else run
    gone, budgets = gone or {}, budgets or {}
    left_out = _jobs_without_data(run, gone) if resumed else {}
    run_jobs = [job for job in run.trained if job.name not in left_out and job.name not in gone]
    configs = {job.name: adapter_config(job, run) for job in run_jobs}
    for job in run_jobs:
        check_optim(job, device, run.dtype)
    rows = {job.name: reader.rows(job) for job in run_jobs}
    eval_rows = {job.name: reader.held_out(job) for job in run_jobs}
    reader.told(f"laying out {run.base_model}")
    skeleton = load_skeleton(run)
    shape = ModelShape.of(skeleton)
    form = _form(run, skeleton, device)
    specs = {job.name: adapter_spec(job, configs[job.name], skeleton) for job in run_jobs}
    for job in run_jobs:
        check_spec(run, job, specs[job.name], skeleton)
    asks = layer_asks(run, skeleton, specs, len(run_jobs) < len(run.jobs))
    warnings = (
        [note for spec in specs.values() for note in spec.notes]
        + [*doubts_of_starts(run, run_jobs), *_made_floats(run, skeleton)]
        + [
            f"job {name!r} {LEFT_OUT}: {why}; --resume takes it up again when that is back"
            for name, why in left_out.items()
        ]
    )
    tokenizer = load_tokenizer(run)
    set_clock(tokenizer, moment or datetime.now())
    auto = run.max_tokens_per_microbatch == "auto"
    budget = 2**31 if auto else int(run.max_tokens_per_microbatch)
    encoder = Encoder.of(run, skeleton, tokenizer, max_steps)
    modality = modality_of(
        run, skeleton, [one for of_job in (rows, eval_rows) for some in of_job.values() for one in some]
    )
    if modality is not None:
        encoder.reader, files_have = modality.reader, tokenizer.chat_template
        tokenizer.chat_template = modality.chat_template or files_have
        encoder.has_template = tokenizer.chat_template != files_have
    jobs = []
    for job in run_jobs:
        most = budgets.get(job.name, budget) if auto else budget
        one, doubts = encoder.job(job, specs[job.name], rows[job.name], eval_rows[job.name], most, reader.told)
        jobs.append(one)
        warnings += doubts
    prepared = PreparedRun(
        run, tokenizer, budget, shape, jobs, warnings + _of_tokenizer(skeleton, tokenizer, jobs), {**left_out, **gone}, asks,
        form, encoder, modality, known_head(run, shape, device),
    )  # fmt: skip
    if run.parallel.divided or run.parallel.package or form is not None:
        from packlora.runtime.wholeness import check_parallel

        check_parallel(prepared, skeleton)
    if auto:
        prepared.budget = max(AUTO_BUDGET[device.type], prepared.longest)
    check_prepared(prepared, resumed)
    return prepared


def _check_device(run: Run) -> torch.device:
    """The device of a run. Raises InputError where it has not what the run asks for."""
    device = choose_device(run.device)
    settle_dtype(run)
    if run.liger is True:
        from packlora.base.liger import check_liger

        check_liger(run.liger, device, run.dtype)
    check_asked(run, device)
    return device


def _of_tokenizer(skeleton: PreTrainedModel, tokenizer: Any, jobs: Sequence[PreparedJob]) -> list[str]:
    """Notes on the base's tokenizer: that an adapter which is continued has another one, where its answers end."""
    notes = _unstopped(skeleton, tokenizer, jobs)
    if folders := [own for job in jobs if (own := job.config.adapter.init_from) is not None]:
        from packlora.base.own_tokenizer import own_template, unused_notes

        notes += unused_notes(folders, tokenizer)
        notes += [
            f"job {job.config.name!r}: {own} was trained with a chat template of its own; data.chat_template: {own} takes it"
            for job in jobs
            if (own := job.config.adapter.init_from) is not None and job.chat_template is None and own_template(own)
        ]
    return notes


def _unstopped(skeleton: PreTrainedModel, tokenizer: Any, jobs: Sequence[PreparedJob]) -> list[str]:
    """Notes where answers are learnt with an end at which generation with the base's own settings goes on."""
    ends = said_ends(skeleton)
    taught = {text: taught_end(templated(tokenizer, text)) for text in {job.chat_template for job in jobs}}
    learnt = dict.fromkeys(
        end
        for job in jobs
        if (end := taught[job.chat_template]) is not None and end not in ends
        if any((sample.ids[sample.is_label] == end).any() for sample in job.encoded.samples[:LOOKED_AT])
    )
    return [
        f"answers are learnt to end with {quoted(tokenizer.convert_ids_to_tokens(end))} (token {end}), and the base's "
        f"generation settings stop at {', '.join(map(str, ends)) or 'no token'}; packlora's own answers stop at it; to serve "
        f"the adapters elsewhere, add {end} to eos_token_id in generation_config.json of the base or the merged model"
        for end in learnt
    ]


def check_spec(run: Run, job: JobConfig, spec: AdapterSpec, skeleton: PreTrainedModel) -> None:
    """Raises InputError where the run cannot train the adapter."""
    if run.offload_embedding:
        from packlora.base.host_embedding import check_host

        check_host(run, skeleton, spec.modules)
    if spec.of_weights:
        from packlora.runtime.starts import check_start_of_weights

        check_start_of_weights(run, job, spec, skeleton)


def modality_of(run: Run, skeleton: PreTrainedModel, rows: Sequence[Rows]) -> Modality | None:
    """Modality that the base model reads beside texts, where rows have some of it. Raises InputError where it reads texts
    alone."""
    if not any(half.files for some in rows for row in some.read.rows for half in row.pair or (row,)):
        return None
    from packlora.modality import plugin

    found: Modality = plugin().modality(base_path(run.base_model), run.revision, skeleton.config)
    return found


def _made_floats(run: Run, skeleton: PreTrainedModel) -> list[str]:
    if not read_as_floats(skeleton.config):
        return []
    return [f"base_model: its experts, which are saved in mxfp4, are read as floats of {run.dtype}"]


def _form(run: Run, skeleton: PreTrainedModel, device: torch.device) -> WeightForm | None:
    """How linear layers of the base model lie. Raises InputError where that cannot be, or its folder holds something else."""
    path = base_path(run.base_model)
    form = prepared_form(run, skeleton, path, device)
    if given().model is None:
        check_held(path, skeleton)
    return form


def layer_asks(run: Run, skeleton: PreTrainedModel, specs: dict[str, AdapterSpec], partly: bool) -> dict[str, Ask]:
    """How adapted layers are to be computed. partly: a pattern may be for layers of a job that is left out, gone or to come."""
    adapted = {path for spec in specs.values() for path, own in spec.modules.items() if own.kind == "linear"}
    linear = [name for name, module in skeleton.named_modules() if partly or name in adapted]
    linear += sorted({path for spec in specs.values() for path, own in spec.modules.items() if own.kind == "router"})
    plan = run.plans.plan
    if isinstance(plan, dict):
        try_patterns(plan, linear, "plans", "plan")
    try:
        return asks_of(plan, run.plans.lossy, run.plans.prefer, linear)
    except ValueError as error:
        raise InputError(f"plans: {error}") from None


def doubts_of_starts(run: Run, jobs: list[JobConfig]) -> list[str]:
    """Doubts about adapters that jobs begin with or are held to: those of another base model, as far as one can tell, and those
    of which half is trained."""
    out = []
    for job in jobs:
        folders = dict.fromkeys([job.adapter.init_from, job.reference_adapter])
        notes = []
        for folder in folders:
            if folder is not None:
                from packlora.adapters.reading import base_note

                notes.append(base_note(folder, base_path(run.base_model)))
        if job.adapter.init_from is not None:
            from packlora.runtime.continued import start_note

            notes.append(start_note(job.adapter))
        out += [f"job {job.name!r}: {note}" for note in notes if note]
    return out


def _jobs_without_data(run: Run, gone: Collection[str]) -> dict[str, str]:
    """Jobs of which a file has gone since the run began, with the name of the file; none where it is so of all jobs.

    What never was a file here, a data set of the hub, is not looked for.
    """
    lost, jobs = {}, [job for job in run.trained if job.name not in gone]
    for job in jobs:
        paths = [*(path for path, _ in job.data.sources), *job.data.eval_paths]
        folders = [path for path in (job.adapter.init_from, job.reference_adapter) if path is not None]
        missing = [path for path in paths if not is_there(path)] + [path for path in folders if not Path(path).exists()]
        if missing:
            lost[job.name] = f"{missing[-1]} does not exist"
    return lost if len(lost) < len(jobs) else {}


def adapter_config(job: JobConfig, run: Run) -> LoraConfig:
    """Adapter of a job in PEFT's terms: as the run file says, or the folder that it begins with."""
    path = base_path(run.base_model)
    if job.adapter.init_from is not None:
        from packlora.runtime.continued import continued_config

        return continued_config(job.adapter, path, run.revision, job.name)
    return peft_config(job.adapter, path, run.revision)


def adapter_spec(job: JobConfig, config: LoraConfig, skeleton: PreTrainedModel) -> AdapterSpec:
    """The layers that a job adapts, held against the adapter that it begins with. config: from adapter_config."""
    if job.adapter.expert_rank != "r":
        from packlora.adapters.expert_targets import divided_ranks

        config = divided_ranks(config, skeleton, job.name)
    if job.adapter.init_from is None and twin_of(skeleton) is None:
        spec = resolve(config, skeleton, job.name)
    else:
        from packlora.adapters import names, reading

        keys = [] if job.adapter.init_from is None else reading.stored_keys(job.adapter.init_from)
        spec = names.resolve(config, skeleton, job.name, keys)
    spec = spec.with_base_dropped(job.adapter.dora_dropout == "peft")
    embedding = next((path for path, own in spec.modules.items() if own.kind == "embedding"), None)
    if embedding is not None and job.train.loraplus_lr_ratio is not None:
        raise InputError(
            f"job {job.name!r}: loraplus_lr_ratio does not go with an adapter of {embedding}, for which LoRA+ has a learning "
            "rate of its own; leave one of them out"
        )
    beside = beside_decoder(skeleton)
    for path, own in spec.modules.items():
        if path in beside and not is_of_images(own.kind):
            raise InputError(
                f"job {job.name!r}: {path} is part of the vision tower, of which linear layers and convolutions are adapted in "
                "this version; leave it out of modules_to_save and target_modules, or name whole paths in the language model"
            )
    if job.adapter.init_from is not None:
        from packlora.runtime.continued import check_start

        check_start(job.adapter, spec, skeleton, job.name)
    if job.reference_adapter not in (None, job.adapter.init_from):
        from packlora.runtime.continued import check_reference

        check_reference(job.reference_adapter, spec, skeleton, job.name)
    return spec
