"""Running of a command: errors become a message and an exit code, libraries load once, and the command line that resumes a run
is put together."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import shlex
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import typer
import typer.core

from packlora.errors import InputError, ProcessError, WriteError, unwritten
from packlora.terminal import say, settle

F = TypeVar("F", bound=Callable[..., Any])


class _PlainSwitches:
    """Help of a command, in which switches show no type."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for one in params:
            if getattr(one, "is_flag", False) and one.metavar is None:
                one.metavar = ""
        return params


class _Command(_PlainSwitches, typer.core.TyperCommand):
    pass


class Group(_PlainSwitches, typer.core.TyperGroup):
    """A command that has commands."""


class App(typer.Typer):
    """A command, or several; they run guarded."""

    def __init__(self, cls: type[Group] = Group, add_completion: bool = False, **settings: Any) -> None:
        super().__init__(cls=cls, add_completion=add_completion, pretty_exceptions_enable=False, **settings)

    def command(
        self, name: str | None = None, *, stopped: str = "stopped", light: bool = False, **settings: Any
    ) -> Callable[[F], F]:
        """Register a command. stopped, light: see guarded."""

        def register(action: F) -> F:
            @functools.wraps(action)
            def run(*args: Any, **options: Any) -> Any:
                return guarded(lambda: action(*args, **options), stopped, light)

            super(App, self).command(name, cls=_Command, **settings)(run)
            return action

        return register


def guarded(action: Callable[[], Any], stopped: str = "stopped", light: bool = False) -> Any:
    """Run an action. Bad input becomes a message on stderr and exit code 2, what cannot be written one and exit code 1.

    stopped: what to say after Ctrl-C. light: it needs no library that takes seconds to load.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # its warning recommends a package that few users need
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    if not light and loads() and speaks():
        say("loading PyTorch and Transformers")
    try:
        return action()
    except InputError as error:
        if speaks():  # all processes of a run found it
            say(str(error))
        if (until_heard := getattr(error, "heard", None)) is not None:  # of a run on several processes, see Mesh.heard
            until_heard()
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
        if type(error).__name__ == "OutOfMemoryError":  # torch's: not imported for its name
            say(f"a device's memory is used up: {error}")
        elif isinstance(error, EOFError):  # click would say "Aborted." and nothing else
            raise RuntimeError(repr(error)) from error
        elif reason is None and not isinstance(error, OSError):
            raise
        elif not isinstance(error, BrokenPipeError):  # the reader has seen enough
            say(f"cannot write: {reason}" if reason else str(error))
        code = 1
    finally:
        settle()
    raise typer.Exit(code) from None


def loads() -> bool:
    """Whether the libraries that take seconds to load are not loaded yet."""
    return "torch" not in sys.modules


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Context around the import of large libraries, in which garbage collection is off. The import makes a million objects that
    stay; searching them for garbage again and again would take a seventh of the import's time, and a third of a second at every
    later collection.

    Ctrl-C in the middle ends the import at once, or at its end where a library swallows the exception (as one raised in a
    __del__).
    """
    asked: list[int] = []

    def ask(number: int, frame: types.FrameType | None) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()  # others may set no handlers
    try:
        gc.disable()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, ask)
        yield
        gc.freeze()
    finally:
        gc.enable()
        if in_main and signal.getsignal(signal.SIGINT) is ask:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if asked:
            raise KeyboardInterrupt


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


def without_resume(words: list[str], *more: str) -> list[str]:
    """A command line without --resume and --from, and without more options that take a value."""
    out, before, valued = [], "", ("--from", *more)
    for word in words:
        if before not in valued and word != "--resume" and word.split("=")[0] not in valued:
            out.append(word)
        before = word
    return out
