"""`packlora serve` on several ranks as torchrun starts it, and a client that trains two models there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forked import Forks
from seeds import SOAK
from waiting import SECONDS, wait_for

ROOT = Path(__file__).parents[1]
MODULES = ("launched", "torch.distributed.run", "packlora.cli", "packlora.serve.app", "uvicorn")
NAME = "Qwen/Qwen3-4B-Instruct-2507"
IDS = list(range(60, 72))


@contextlib.contextmanager
def forks_of(folder: Path, module: str) -> Iterator[Forks | None]:
    """Where processes run that need a module of the service; None under soak: each is a Python of its own."""
    if SOAK:
        yield None
        return
    with Forks(folder, [*MODULES, module]) as forks:
        yield forks


class Process:
    """The service as a process, or as torchrun's.

    Args:
        forks: in which it runs; None: it is a Python of its own.
        out: file of what it says.
    """

    def __init__(self, forks: Forks | None, ranks: int, words: list[str], port: int, out: Path) -> None:
        self.ranks, self.url, self.out = ranks, f"http://127.0.0.1:{port}", out
        away = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        env = {key: value for key, value in os.environ.items() if key not in away} | {"OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
        run, words = ["--standalone", "--nproc-per-node", str(ranks)], ["serve", *words, "--port", str(port)]
        with out.open("a") as file:
            pipes: dict[str, Any] = {"env": env, "stdout": file, "stderr": file}
            if forks is None:
                start = ["torch.distributed.run", *run, "-m", "packlora"] if ranks > 1 else ["packlora"]
                self.process = subprocess.Popen([sys.executable, "-m", *start, *words], **pipes)
            elif ranks > 1:
                inner = forks.words("launched", "none", "0", *words)
                self.process = forks.start("torch.distributed.run", *run, *inner, **pipes)
            else:
                self.process = forks.start("launched", "none", "0", *words, **pipes)

    def wait(self) -> None:
        """Wait until it answers."""
        wait_for(lambda: self.process.poll() is not None or self.is_there())
        assert self.process.poll() is None, self.said

    def is_there(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"{self.url}/api/v1/healthz"))
        return False

    @property
    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/status") as answer:
            return dict(json.load(answer))

    def kill(self, rank: int) -> None:
        """Kill a rank other than 0."""
        found = re.search(r"process (\d+)", self.status["ranks"][rank])
        assert found is not None
        os.kill(int(found[1]), signal.SIGKILL)

    def end(self) -> None:
        """End it as Ctrl-C does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(SECONDS)

    @property
    def said(self) -> str:
        return self.out.read_text()


@contextlib.contextmanager
def client_of(url: str) -> Iterator[Any]:
    """The public client."""
    import tinker

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tinker.ServiceClient(base_url=url, api_key="tml-local") as found:
            yield found


def story(client: Any, between: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Two models learn, one after the other's request, and are sampled.

    Args:
        between: is called when the first results are there and most requests are promised.

    Returns:
        Losses of both and their sampled tokens with log-probabilities.
    """
    from tinker import types

    def datum(number: int) -> Any:
        ids = [number + own for own in IDS]
        inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
        return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)

    kinds: list[dict[str, Any]] = [{"rank": 4}, {"rank": 8, "user_metadata": {"packlora": {"use_dora": True}}}]
    models = [client.create_lora_training_client(base_model=NAME, seed=1, **kind).result() for kind in kinds]
    futures = []
    for step in range(12):
        for number, own in enumerate(models):
            futures.append(own.forward_backward([datum(number)] * 4, "cross_entropy"))
            own.optim_step(types.AdamParams(learning_rate=3e-3))
        if step == 7:
            futures[1].result()
            between()
    found: dict[str, Any] = {"losses": [future.result().metrics["loss:sum"] for future in futures], "sampled": []}
    params = types.SamplingParams(max_tokens=6, seed=1, temperature=1.0)
    for own in models:
        sampler = own.save_weights_and_get_sampling_client("now")
        drawn = sampler.sample(types.ModelInput.from_ints(IDS[:4]), 2, params).result()
        found["sampled"] += [(one.tokens, one.logprobs) for one in drawn.sequences]
    return found
