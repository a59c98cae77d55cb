"""Reading a run file: YAML, variables of the environment, defaults of all jobs, and overrides.

What a run holds, and which values are accepted, is config's; what is said of other values is run_file_errors.py's.
"""

from __future__ import annotations

import copy
import glob
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from packlora.config import BASE, MOST_NESTED, DataSource, JobConfig, Run
from packlora.config.data import TEMPLATES
from packlora.errors import InputError, kind_of, quoted, shown

MOST_BYTES = 8 * 2**20
"""Bytes of the largest run file; PyYAML reads about 100 kB a second."""


class _RunFileLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and takes plain words as YAML 1.2 does: 2e-4 is a number; yes, 1:30, 1_000 and
    2026-01-01 are texts. So is 010, which is 8 in YAML 1.1 and 10 in YAML 1.2: a number that is no number to all is refused.
    """

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= MOST_NESTED:  # PyYAML looks back over all open brackets at each one
            raise RecursionError
        super().fetch_flow_collection_start(token)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, _ in node.value:  # keys as written: merge keys (<<) are not filled in yet
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise InputError(
                    f"{self.name}, line {key_node.start_mark.line + 1}: "
                    f"the key {key_node.value!r} stands here a second time"
                )
            seen.add(key_node.value)
        return node


_RunFileLoader.yaml_implicit_resolvers = {}
for _tag, _words, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
     list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
):  # fmt: skip
    _RunFileLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_words})\Z"), _first)


def _scalar(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    """Value of a scalar by PyYAML's own function, whose errors name no line."""
    try:
        value = yaml.SafeLoader.yaml_constructors[node.tag](loader, node)
        if isinstance(value, int):
            str(value)  # raises ValueError for more than 4300 digits, which no message could quote
        return value
    except (ValueError, LookupError, AttributeError) as error:
        said = f"{quoted(node.value, 40)} cannot be read as {node.tag.rpartition(':')[2]}"
        raise yaml.constructor.ConstructorError(None, None, said, node.start_mark) from error


for _tag in ("bool", "int", "float", "timestamp"):
    _RunFileLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _scalar)


def _parse_yaml(text: str, name: str) -> Any:
    try:
        loader = _RunFileLoader(text)
        loader.name = name
        return loader.get_single_data()
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # e.g. "\UFFFFFFFF"
        raise InputError(f"{name} is not valid YAML: {error}") from None
    except RecursionError:
        raise InputError(f"{name}: lists or mappings are nested too deep in one another to be read") from None


def load_run(path: str | Path, overrides: list[str] | None = None) -> Run:
    """Read and check a run file.

    Args:
        path: the YAML file.
        overrides: `dotted.key=value` strings, e.g. `jobs.0.train.learning_rate=1e-4`; a job may be named by its number
            or its name.

    Raises:
        InputError: the file cannot be read, or anything in it is unknown, misspelt, of the wrong type or out of range.
    """
    path = Path(path)
    tree = _read_tree(path, "a run file is a mapping with base_model, output_dir and jobs")
    _override(tree, overrides)
    run = parse_run(expanded(tree, str(path)), str(path))
    for job in run.jobs:
        _find_files(path, job)
    return run


def _read_tree(path: Path, what: str) -> dict[str, Any]:
    """The mapping of a YAML file. what: it should be."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        text = raw.decode()
    except FileNotFoundError:
        raise InputError(
            f"cannot read the run file {path}: it does not exist; packlora init DATA -o RUN.yaml writes one"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read the run file {path}: it is no UTF-8 text ({error}); save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a path that cannot be
        raise InputError(f"cannot read the run file {path}: {getattr(error, 'strerror', None) or error}") from None
    if path.suffix != ".json" and path.suffix in import_module("packlora.data.formats").endings():
        raise InputError(
            f"{path} is a data file, and this takes a run file; `packlora init {shlex.quote(str(path))}` writes one for it"
        )
    if len(raw) > MOST_BYTES:
        raise InputError(f"the run file {path} is larger than {MOST_BYTES // 2**20} MiB; this is not a run file")
    tree = _parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise InputError(f"{path}: {what}; found {kind_of(tree)}")
    return tree


def _find_files(run_file: Path, job: JobConfig, absolute: bool = False) -> None:
    """A relative path of a job is looked up from the current folder, then from the run file's. absolute: made so where it is
    that of a file."""

    def found(path: str) -> str:
        beside = _beside(run_file, path)
        return os.path.abspath(beside) if absolute and os.path.exists(beside) else beside

    job.data.path = _each(job.data.path, found)
    job.data.eval_path = _each(job.data.eval_path, found)
    job.data.chat_template = _each(job.data.chat_template, lambda path: path if path in TEMPLATES else found(path))
    job.adapter.init_from = _each(job.adapter.init_from, found)

    def found_code(spec: str) -> str:
        file, colon, name = spec.rpartition(":")
        return f"{found(file)}:{name}" if colon and file.endswith(".py") else spec

    job.train.objective = _each(job.train.objective, found_code)
    if job.rollout is not None:
        for key in job.rollout.CODE:
            setattr(job.rollout, key, _each(getattr(job.rollout, key), found_code))
        if job.rollout.teacher != BASE:
            job.rollout.teacher = _each(job.rollout.teacher, found)
    if job.train.reference != BASE:
        job.train.reference = _each(job.train.reference, found)


def run_from(tree: Mapping[str, Any], overrides: list[str] | None = None) -> Run:
    """Check a run that is a mapping of the keys of a run file; it is not changed. Overrides and errors as in load_run."""
    try:
        own = copy.deepcopy(dict(tree))
    except RecursionError:
        raise InputError("the run: lists or mappings are nested too deep in one another to be read") from None
    _override(own, overrides)
    return parse_run(expanded(own, "the run"), "the run")


def _each(value: Any, found: Callable[[str], str]) -> Any:
    """Apply `found` to a path, or to each path of a list."""
    if isinstance(value, list):
        return [_each(one, found) for one in value]
    if isinstance(value, DataSource):
        return value.model_copy(update={"path": found(value.path)})
    return found(value) if isinstance(value, str) else value


def _beside(run_file: Path, path: str) -> str:
    beside = run_file.parent / path
    return str(beside) if not _is_there(path) and _is_there(str(beside)) else path


def _is_there(path: str) -> bool:
    return os.path.exists(path) or next(glob.iglob(path, recursive=True), None) is not None


# --- what stands for something else ------------------------------------------------------------------------------------

REFERENCE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<otherwise>[^}]*))?\}|\$\{")
"""A variable of the environment, with what stands for it where it is not set or empty; $${ is a plain ${."""
SECTIONS = ("data", "adapter", "train")


def expanded(tree: dict[str, Any], source: str) -> dict[str, Any]:
    """The tree of a run file with variables of the environment filled in, `defaults` merged under every job, and without what
    a run does not have: defaults, and keys that begin with x-.

    Raises:
        InputError: a variable is not set and has no default, or defaults is no mapping, or holds a name.
    """
    tree = {key: value for key, value in tree.items() if not (isinstance(key, str) and key.startswith("x-"))}
    try:
        done: dict[int, Any] = {}
        tree = {key: _filled(value, shown(key), source, done) for key, value in tree.items()}
    except RecursionError:
        raise InputError(f"{source}: lists or mappings are nested too deep in one another to be read") from None
    defaults, jobs = tree.pop("defaults", {}), tree.get("jobs")
    if not isinstance(defaults, dict):
        raise InputError(f"{source}: defaults: input should be a mapping of keys of a job; found {kind_of(defaults)}")
    if "name" in defaults:
        raise InputError(f"{source}: defaults: has a name, which is each job's own; give it there")
    if isinstance(jobs, list):
        tree["jobs"] = [_under(defaults, job) if isinstance(job, dict) else job for job in jobs]
    elif defaults:
        tree.setdefault("jobs", None)
    return tree


def _under(defaults: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """A job with what it does not say itself: its sections key by key, everything else whole."""
    merged = copy.deepcopy(defaults) | job
    for section in SECTIONS:
        if isinstance(ours := job.get(section), dict) and isinstance(theirs := defaults.get(section), dict):
            merged[section] = copy.deepcopy(theirs) | ours
    return merged


def _filled(value: Any, where: str, source: str, done: dict[int, Any]) -> Any:
    """A value with variables of the environment in the place of their references. done: what became of lists and mappings,
    which YAML may hold several times, and in themselves."""
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, dict):
        mapping = done[id(value)] = {}
        mapping.update({key: _filled(part, f"{where}.{shown(key)}", source, done) for key, part in value.items()})
        return mapping
    if isinstance(value, list):
        items = done[id(value)] = []
        items += [_filled(part, f"{where}[{number}]", source, done) for number, part in enumerate(value)]
        return items
    return _filled_text(value, where, source) if isinstance(value, str) and "${" in value else value


def _filled_text(value: str, where: str, source: str) -> Any:
    """A text that is one reference alone is a number or a truth value where the variable reads like one."""

    def variable(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        name = match["name"]
        if name is None:
            raise InputError(
                f"{source}: {where}: has '${{' in {quoted(value)}; write ${{NAME}} or ${{NAME:-otherwise}}"
            )
        if found := os.environ.get(name, ""):
            return found
        if match["otherwise"] is None:
            raise InputError(
                f"{source}: {where}: the environment variable {name} is not set; write ${{{name}:-otherwise}}"
            )
        return str(match["otherwise"])

    text = REFERENCE.sub(variable, value)
    whole = REFERENCE.fullmatch(value)
    if whole is not None and whole["name"] and re.fullmatch(r"[-+.\w]{1,100}", text):
        scalar = _parse_yaml(text, f"{source}: {where}")
        return scalar if isinstance(scalar, bool | int | float) else text
    return text


def parse_run(tree: dict[str, Any], source: str) -> Run:
    """Validate a parsed run file. Raises InputError that lists every problem, one a line, with the job's name."""
    try:
        return Run.model_validate(tree)
    except ValidationError as error:
        from packlora.run_file_errors import explained  # of a refusal alone

        raise InputError(f"{source}:\n" + "\n".join(f"  {line}" for line in explained(error, tree))) from None


def _override(tree: dict[str, Any], overrides: Sequence[str] | None) -> None:
    """Change keys of a tree, in place, by what `--set` gives."""
    for override in overrides or ():
        import_module("packlora.overrides").apply(tree, override, _parse_yaml)


# --- jobs by themselves --------------------------------------------------------------------------------------------------


def parse_jobs(jobs: Any, source: str) -> list[JobConfig]:
    """Validate the value of a `jobs:` key by itself. Raises InputError as parse_run."""
    return parse_run({"base_model": "-", "output_dir": "-", "jobs": jobs}, source).jobs


def load_jobs(path: str | Path, overrides: list[str] | None = None) -> list[JobConfig]:
    """Read a file that holds `jobs:` alone; its paths are looked up as load_run does, and are absolute. Raises InputError."""
    path = Path(path)
    tree = expanded(_read_tree(path, "a file of jobs is a mapping with jobs alone"), str(path))
    if odd := sorted(map(str, tree.keys() - {"jobs"})):
        raise InputError(
            f"{path}: {quoted(odd[0])} is of the whole run, which trains already; a file of jobs holds jobs alone"
        )
    _override(tree, overrides)
    jobs = parse_jobs(tree.get("jobs"), str(path))
    for job in jobs:
        _find_files(path, job, absolute=True)
    return jobs


def changed_job(tree: dict[str, Any], overrides: list[str]) -> JobConfig:
    """A job with `dotted.key=value` changes, e.g. `train.learning_rate=1e-4`. Raises InputError."""
    _override(tree, overrides)
    return parse_jobs([tree], "the request")[0]
