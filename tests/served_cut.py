"""A service whose base model is cut over the processes of ranks.py, and a story of two models; functions run on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving import NAME, Talk, datum

from packlora.serve.group.follower import work
from packlora.serve.group.host import GroupHost
from packlora.serve.group.leader import GroupService
from packlora.serve.group.together import processes
from packlora.serve.host import run_of
from packlora.serve.ranks.meeting import Place, gathered, joined
from packlora.serve.ranks.records import Rank

KINDS: list[dict[str, Any]] = [
    {"rank": 8, "seed": 3, "lora_dropout": 0.2},
    {"rank": 3, "seed": 4, "use_dora": True, "target_modules": ["q_proj", "down_proj", "lm_head"], "lora_alpha": 6},
]


@contextmanager
def cut(rank: int, size: int, base: str, state: Path, *settings: str) -> Iterator[Talk | None]:
    """A client of a service, on rank 0; None on the others once it is over."""
    place, run = Place(rank, size, rank), run_of(base, ["device=cpu", *settings], None, state, size)
    if rank:
        channel = joined(place, state)
        with processes(size) as group:
            try:
                work(channel, lambda: {NAME: GroupHost(NAME, run, 256, group, 64)})
            finally:
                channel.close()
        yield None
        return
    with gathered(place, state) as channels, processes(size) as group:
        host = GroupHost(NAME, run, 256, group, 64)
        talk = Talk(GroupService({NAME: host}, state, [Rank(n, own).ready() for n, own in channels.items()]))
        yield talk
        talk.service.stop()


def told(talk: Talk) -> dict[str, Any]:
    """Two models learn, are saved and loaded; their results and whole tensors."""
    session, found = talk.session(), dict[str, Any]()
    models = [talk.model(session, number, **own) for number, own in enumerate(KINDS)]
    promises = []
    for step in range(3):
        for number, model in enumerate(models):
            rows = [datum(100 * number + 10 * step + n, 20 + n) for n in range(3)]
            promises.append(talk.forward_backward(model, rows))
            promises.append(talk.step(model, weight_decay=0.1, grad_clip_norm=0.5))
            promises.append(talk.call(model, "save_weights", path=f"s{step}"))
    talk.run()
    found["results"] = [plain(talk.result(own)) for own in promises]
    found["tensors"] = [talk.tensors(model) for model in models]
    return found


def plain(result: Any) -> Any:
    """A result without ids, which differ."""
    if isinstance(result, tuple):
        return result[0], result[1].tolist()
    return {key: own for key, own in result.items() if key not in ("path", "sampling_session_id")}


def first(rank: int, base: str, state: Path) -> Any:
    with cut(rank, 2, base, state, "dtype=float64") as talk:
        return None if talk is None else told(talk)
