"""Functions of a user that a run file names, as FILE.py:FUNCTION: losses and rewards.

The file is one that the user has on this machine; nothing is fetched, and nothing that came with a model is run.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from asyncio import CancelledError
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packlora.errors import InputError, reason_of
from packlora.given import MEMORY, given

RAISED = (Exception, SystemExit, CancelledError)
"""Whatever code of a user raises: also `sys.exit`, or a cancelled task, costs what was asked of it, and not the run."""


def load_function(spec: str, key: str) -> tuple[str, Any]:
    """File, and the function in it, which runs the file once; or a function that a Python program has handed over, with its
    file.

    Args:
        key: of the run file, for messages.

    Raises:
        InputError: there is no such file or function, or the file fails.
    """
    if spec.startswith(MEMORY):
        return _handed_over(spec, key)
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise InputError(f"{key} {spec}: there is no file {path}")
    try:
        found = importlib.util.spec_from_file_location(
            f"function_{re.sub(r'[^0-9A-Za-z_]', '_', str(Path(path).absolute()))}", path
        )
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[found.name] = module  # where dataclasses look up their types
        found.loader.exec_module(module)
    except RAISED as error:
        raise InputError(f"{key} {spec}: {place_of(error, path)} failed: {reason_of(error)}") from None
    function = getattr(module, name, None)
    if not callable(function):
        known = [
            own
            for own, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
        ]
        raise InputError(f"{key} {spec}: {path} has no {name!r}; it has {', '.join(known) or 'none'}")
    return path, function


def names_a_function(spec: str) -> bool:
    """Whether a text is FILE.py:FUNCTION, or stands for a function that a Python program hands over."""
    file, _, name = spec.rpartition(":")
    return (file.endswith(".py") and name.isidentifier()) or spec.startswith(MEMORY)


def _handed_over(spec: str, key: str) -> tuple[str, Any]:
    function, _ = given().losses.get(spec, (None, None))
    if function is None:
        raise InputError(
            f"{key} {spec}: a function that was given in Python and is in no file; give it again, by packlora.Trainer"
        )
    code = getattr(function, "__code__", None)
    return code.co_filename if code is not None else f"<{type(function).__name__}>", function


def why_not_called(function: Any, fields: Mapping[str, Any]) -> str | None:
    """Why a function cannot be called with arguments of these names; None where it can, or tells no names."""
    try:
        inspect.signature(function).bind(**fields)
    except TypeError as error:
        return str(error)
    except ValueError:
        return None
    return None


def place_of(error: BaseException, file: str) -> str:
    """Line of the user's file at which an error came up."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{file}, line {error.lineno},"
    known = {file, str(Path(file).absolute())}  # of a module Python writes the whole path
    own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename in known]
    return f"{file}, line {own[-1]}," if own else file
