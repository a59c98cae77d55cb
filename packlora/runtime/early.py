"""Checks of a run that take no library which is slow to load: a slip is told within a second of the command."""

from __future__ import annotations

from pathlib import Path

from packlora.base.demo_model import check_place
from packlora.config import DataConfig, Run
from packlora.config.adapter_file import read_config
from packlora.data.reader import Reader
from packlora.data.readers import is_file_name
from packlora.lora_config import CONFIG
from packlora.terminal import Activity


def read_early(run: Run, resume: bool) -> Reader:
    """Look whether the folders of a run are there, and read its data files. A run that is resumed leaves out jobs whose data is
    gone, so nothing is read for it here.

    Raises:
        InputError: a folder is not there, or a file is missing, malformed or holds what is no sample.
    """
    check_place(run.base_model)
    reader = Reader()
    if resume:
        return reader
    for job in run.jobs:
        for folder in (job.adapter.init_from, job.reference_adapter):
            if folder is not None and not (Path(folder) / CONFIG).exists():
                read_config(folder, job.name)  # says what is there instead
    with Activity() as told:
        reader.told = told
        for job in run.jobs:
            if _is_of_files(job.data):
                reader.rows(job)
                reader.held_out(job)
    return reader


def _is_of_files(data: DataConfig) -> bool:
    """Whether data is in files: what is on a hub takes libraries that are slow to load."""
    return all(map(is_file_name, [*(path for path, _ in data.sources), *data.eval_paths]))
