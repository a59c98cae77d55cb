"""Entry point of the scheduler's own processes: one request a line on standard input.

    python -m packlora.schedule.worker milp | window

It answers on standard output, with signs of life between the answers while it is at work, and ends when its input does, so that
it never outlives the process that started it. What answers (milp.py, work.py) is imported late: the first sign of life must not
wait for numpy or scipy on a busy machine, and a process imports what its own kind of request needs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from packlora.errors import InputError

BEAT_S = 0.5
ALIVE = json.dumps({"alive": True}) + "\n"
"""See process.py, which is not imported here: it would cost the start."""


def main() -> None:
    """Answer requests until the input ends, or nobody reads the answers. A signal ends the process without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _answer_all()
    except BrokenPipeError:  # whoever asked was killed
        os._exit(0)


def _answer_all() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints may not get between the answers
    threading.Thread(target=_beat, args=[answers], daemon=True).start()
    if sys.argv[1:] == ["milp"]:
        try:
            import scipy.optimize  # noqa: F401
        except Exception as error:
            _say(answers, {"missing": f"scipy cannot be used ({error})"})
            return
        from packlora.schedule.milp import answer
    else:
        from packlora.schedule.work import window as answer
    _say(answers, {"ready": True})
    for line in sys.stdin:
        _at_work.set()
        if not line.endswith("\n"):  # whoever asked was killed in the middle
            return
        request = json.loads(line)
        try:
            _say(answers, {"answer": answer(request)})
        except InputError as error:
            _say(answers, {"input_error": str(error)})
        except Exception as error:
            _say(answers, {"error": f"{type(error).__name__}: {error}"})


_at_work = threading.Event()
_at_work.set()  # on the start
_writing = threading.Lock()


def _beat(answers: Any) -> None:
    """Signs of life until the process ends. None while it waits for a request: nobody reads them then."""
    try:
        while _at_work.wait():
            with _writing:
                if _at_work.is_set():
                    answers.write(ALIVE)
                    answers.flush()
            time.sleep(BEAT_S)
    except OSError:
        return  # nobody listens; the input ends as well


def _say(answers: Any, tree: dict[str, Any]) -> None:
    with _writing:
        _at_work.clear()
        answers.write(json.dumps(tree, separators=(",", ":")) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
