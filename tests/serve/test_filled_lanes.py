"""Lanes that have requests, which the queue keeps apart from those without, against a look at all lanes."""

from __future__ import annotations

import random

import pytest
from seeds import SEED

from packlora.serve.queue import Lane, Queue, Request

STATES = ("waiting", "done", "failed")


def request(lane: Lane, seq: int, state: str) -> Request:
    return Request(f"{lane.model}-{seq}", lane.model, seq, "optim_step", b"x" * seq, 1, state)


def check(queue: Queue) -> None:
    lanes = list(queue.lanes.values())
    waiting = [own for lane in lanes for own in lane.requests.values() if not own.is_replayed]
    assert set(queue.working()) == {lane for lane in lanes if lane.head is not None} == set(queue.due())
    assert queue.waiting == len(waiting) and queue.bytes == sum(len(own.payload) for own in waiting)
    assert list(queue._filled.values()) == [queue.lanes[model] for model in queue._filled]
    assert set(queue._filled) == {lane.model for lane in lanes if lane.requests}, "nothing is left of those without"


def change(queue: Queue, closed: list[Lane], draw: random.Random) -> None:
    """One of what a service does to a queue."""
    lane, what = (
        draw.choice([*queue.lanes.values(), None]),
        draw.choice(("put", "put", "pop", "fail", "rewind", "rouse", "close")),
    )
    if lane is None:
        lane = Lane(f"owner {draw.randrange(3)}", f"model {len(queue.lanes) + len(closed)}", "base")
        queue.rewind(lane, 1, [request(lane, seq, draw.choice(STATES)) for seq in range(1, draw.randrange(1, 4))])
        queue.open(lane)
    elif what == "put" and (seq := lane.next + draw.randrange(4)) not in lane.requests:
        assert queue.put(request(lane, seq, draw.choice(STATES[::2])))
    elif what == "pop" and lane.head is not None:
        queue.pop(lane, lane.head)
    elif what == "fail" and lane.waiting:
        with queue.changed:
            lane.fail(min((own for own in lane.requests.values() if not own.is_replayed), key=lambda own: own.seq))
    elif what == "rewind":
        first = draw.randrange(1, lane.next + 1)
        queue.rewind(lane, first, [request(lane, seq, "done") for seq in range(first, lane.next)])
    elif what == "rouse":
        lane.is_roused = draw.random() < 0.5
    elif what == "close":
        waits = lane.waiting
        assert len(queue.close(lane.model)) == waits and not queue.put(request(lane, 99, "waiting"))
        closed.append(lane)
        check(queue)
        if lane.requests:  # its work was under way
            queue.pop(lane, next(iter(lane.requests.values())))


@pytest.mark.parametrize("case", range(60))
def test_lanes_with_requests_are_known_after_any_change(case: int) -> None:
    queue, closed, draw = Queue(), list[Lane](), random.Random(SEED + case)
    for _ in range(80):
        change(queue, closed, draw)
        check(queue)


def test_owners_that_always_have_work_are_given_equal_shares_and_their_models_too() -> None:
    queue, draw, given = Queue(), random.Random(SEED), dict[str, int]()
    lanes = [
        Lane(owner, f"{owner} {number}", "base")
        for owner, many in (("a", 9), ("b", 1), ("c", 3))
        for number in range(many)
    ]
    for lane in lanes:
        queue.open(lane)
        queue.put(request(lane, 1, "waiting"))
    for _ in range(3000):
        first, tokens = queue.due()[0], draw.randrange(1, 50)
        queue.shares.charge(first, tokens)
        for name in (first.owner, first.model):
            given[name] = given.get(name, 0) + tokens
        queue.pop(first, first.requests[first.next])
        queue.put(request(first, first.next, "waiting"))
    owners = [given[name] for name in "abc"]
    assert max(owners) - min(owners) < 150
    for name in "abc":
        models = [given[lane.model] for lane in lanes if lane.owner == name]
        assert max(models) - min(models) < 150
