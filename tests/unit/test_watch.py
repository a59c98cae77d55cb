"""packlora watch: whom its server answers, and what it makes of a folder that a run writes to, has left, or has yet to make."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_report import write_run
from waiting import SECONDS

from packlora.cli import app
from packlora.commands.watch import HOST, Server, output_folder, own_names, report_again
from packlora.errors import InputError
from packlora.files import lock_folder
from packlora.report.follow import opened
from packlora.report.live_page import LivePage
from packlora.report.run_files import FollowedRun
from packlora.report.series import PageData, Thinned

NAMES = ("one", "two")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run in progress, which this process holds."""
    out = tmp_path / "out"
    out.mkdir()
    write_run(out, 20, None, NAMES)
    with lock_folder(out):
        yield out


@pytest.fixture
def served(folder: Path) -> Iterator[Server]:
    with Server([folder], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


Ask = Callable[..., tuple[int, dict[str, str], bytes]]


@pytest.fixture
def ask(served: Server) -> Ask:
    def request(path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(HOST, served.server_port, timeout=SECONDS)
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()

    return request


def lines(values: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def step(job: str, number: int, **more: Any) -> dict[str, Any]:
    return {"job": job, "step": number, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-4, "tokens": 10, "seconds": 1.0, **more}


# --- whom it answers ---------------------------------------------------------------------------------------------------


def test_the_page_and_its_data_are_served_and_nothing_else(ask: Ask, folder: Path) -> None:
    (folder.parent / "secret").write_text("secret")
    status, headers, page = ask("/")
    assert status == 200 and b"<!doctype html>" in page and headers["Content-Type"] == "text/html; charset=utf-8"
    status, headers, data = ask("/data?look=-1")
    assert status == 200 and {job["name"] for job in json.loads(data)["jobs"]} == set(NAMES)
    assert ask("/", "HEAD")[0] == 200 and ask("/", "HEAD")[2] == b""
    for path in (
        "/run.json", "/metrics.jsonl", "/../secret", "/..%2fsecret", "/%2e%2e/secret", "/./", "/data", "/data?look=1&epoch=1",
        "/data?look=x", "/data?look=1&more=1", "/?x=1", "/page.js", "/data/../", "/\\..\\secret",
        "/data?look=" + "9" * 400,
    ):  # fmt: skip
        assert ask(path)[0] == 404, path
    for path in ("http://evil.example/", "evil.example:80", "*"):
        assert ask(path)[0] in (403, 404), path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
        assert ask("/", method)[0] == 501


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil.example:{port}", "0.0.0.0:{port}",
        "", "[::1]:{port}",
    ],
)  # fmt: skip
def test_another_host_is_refused_as_dns_rebinding_would_name_it(host: str, ask: Ask, served: Server) -> None:
    for path in ("/", "/data?look=-1"):
        status, _, body = ask(path, Host=host.format(port=served.server_port))
        assert (status, body) == (403, b"Forbidden\n")


def test_own_names_are_answered_and_other_origins_refused(ask: Ask, served: Server) -> None:
    port = served.server_port
    assert ask("/", Host=f"localhost:{port}")[0] == ask("/", Host=f"LOCALHOST:{port}")[0] == 200
    assert ask("/", Origin=f"http://127.0.0.1:{port}")[0] == 200
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"):
        assert ask("/data?look=-1", Origin=origin)[0] == 403
    assert ask("/data?look=-1", Sec_Fetch_Site="cross-site")[0] == 403
    assert ask("/", Sec_Fetch_Site="cross-site")[0] == 200  # a link to it


def test_on_the_port_that_browsers_leave_out_the_page_is_named_without_it(ask: Ask, served: Server) -> None:
    served.own = own_names(80)
    for host in ("127.0.0.1", "localhost", "LOCALHOST", "127.0.0.1:80", "localhost:80"):
        assert ask("/", Host=host)[0] == 200
        assert ask("/data?look=-1", Host=host, Origin=f"http://{host.lower()}")[0] == 200
    for host in ("evil.example", "127.0.0.1:81", "127.0.0.1.", ""):
        assert ask("/", Host=host)[0] == 403
    assert "127.0.0.1" not in own_names(8080)


def test_only_this_machine_is_listened_to_and_the_browser_is_held_to_the_page(ask: Ask, served: Server) -> None:
    assert served.socket.getsockname()[0] == "127.0.0.1"
    headers = ask("/")[1]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert "'unsafe-inline'" not in headers["Content-Security-Policy"].partition("script-src")[2]
    assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")


def test_a_run_json_of_any_content_makes_a_page_or_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, 3, None, NAMES)
    record = tmp_path / "run.json"
    sound, odd = json.loads(record.read_text()), (5, "\x1b[2J", [], None, [None], {"x": 5}, True)
    places = [
        ("config",), ("config", "jobs"), ("config", "jobs", 0), ("config", "jobs", 0, "adapter"), ("config", "schedule"),
        ("config", "jobs", 0, "train", "learning_rate"), ("jobs",), ("jobs", "one"), ("jobs", "one", "samples"), ("result",),
        ("jobs", "one", "length_histogram", "edges", 0), ("model", "parameters"), ("versions",), ("warnings",), ("created",),
    ]  # fmt: skip
    refused = list[str]()
    for *path, last in places:
        for value in odd:
            changed = json.loads(json.dumps(sound))
            node = changed
            for key in path:
                node = node[key]
            node[last] = value
            record.write_text(json.dumps(changed))
            try:
                assert report_again(tmp_path) == tmp_path / "report.html"
            except InputError as error:
                refused.append(str(error))
    assert len(refused) > 30 and all("run.json, or a log beside it, holds what no run" in text for text in refused)
    assert capsys.readouterr().err == ""
    for raw in (b"", b"{", b"\xff", b"[]", b"null", b"[" * 100_000):
        record.write_bytes(raw)
        report_again(tmp_path)
        assert f"note: {record} holds no JSON object" in capsys.readouterr().err


def test_a_port_that_is_taken_and_what_is_no_run_are_refused(served: Server, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"--port {served.server_port}: .*; leave it out for a free one"):
        Server([tmp_path], served.server_port)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(InputError, match="neither the output folder of a run nor a run file"):
        output_folder(tmp_path / "notes.txt")


def test_a_request_that_never_ends_keeps_nobody_waiting(ask: Ask, served: Server) -> None:
    with socket.create_connection((HOST, served.server_port)) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert ask("/")[0] == 200


def test_whatever_bytes_come_they_are_refused_and_the_page_is_served_on(
    ask: Ask, served: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    own = f"Host: 127.0.0.1:{served.server_port}\r\n".encode()
    get, end = b"GET / HTTP/1.1\r\n", b"Connection: close\r\n\r\n"
    hostile = [
        b"",
        b"\r\n\r\n",
        b"\0" * 100,
        b"\xff\xfe\r\n\r\n",
        b"\x16\x03\x01\x02\0\x01\0",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.\xb2\r\n\r\n",
        b"GET / HTTP/0.9\r\n\r\n",
        b"GET /\r\n",
        b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n",
        get + end,
        get + own + own + end,
        get + b"Host: evil\r\n" + own + end,
        get + b"Host:" + end,
        get + b"Host: \xff" + end,
        get + own + b"Origin: http://evil\r\n" + end,
        get + own + b"Origin: \r\n" + end,
        get + own + b"X: " + b"y" * 70_000 + b"\r\n" + end,
        get + own + b"".join(b"H%d: x\r\n" % number for number in range(200)) + end,
        get + own + b" folded: x\r\n" + b"no colon\r\n" + end,
        b"POST / HTTP/1.1\r\n" + own + b"Content-Length: 99999999999\r\n" + end,
        b"GET http://evil/ HTTP/1.1\r\n" + own + end,
        b"GET /data?look=\xd9\xa1 HTTP/1.1\r\n" + own + end,
        b"GET /%00 HTTP/1.1\r\n" + own + end,
        b"GET //evil/.. HTTP/1.1\r\n" + own + end,
        b"GET /\x1b]0;x\x07 HTTP/1.1\r\n" + own + end,
        b"TRACE / HTTP/1.1\r\n" + own + end,
        b"get / HTTP/1.1\r\n" + own + end,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        get.replace(b"1.1", b"1.0") + end,
    ]
    for raw in hostile:
        with socket.create_connection((HOST, served.server_port), timeout=SECONDS) as link:
            link.sendall(raw)
            link.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while block := link.recv(65536):
                    answer += block
            except ConnectionError:
                pass
        assert b"200 OK" not in answer and b"<!doctype html>" not in answer, raw[:80]
        assert b"\x1b" not in answer and b"Traceback" not in answer
    assert ask("/")[0] == 200 and capsys.readouterr() == ("", "")


# --- what it shows of a folder ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["renamed", "in place", "gone"])
def test_a_file_that_a_resumed_run_has_written_anew_is_read_anew(folder: Path, how: str) -> None:
    data = PageData(FollowedRun(folder))
    data.follow()
    path = folder / "metrics.jsonl"
    kept = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= 2]
    if how == "renamed":
        (folder / "new").write_text("".join(kept))
        os.replace(folder / "new", path)
    elif how == "in place":
        path.write_text("".join(kept))
    else:
        path.unlink()
    assert data.follow()
    steps = [job["steps"] and job["steps"]["step"] for job in data.numbers()["jobs"]]
    assert steps == [None, None] if how == "gone" else steps == [[1, 2], [1, 2]]


def test_a_run_that_has_not_begun_is_waited_for_and_a_killed_one_is_told_from_a_running_one(tmp_path: Path) -> None:
    out = tmp_path / "later"
    page = LivePage(out, clock=lambda: 0.0)
    assert "later" in page.html() and page.news(-1)["jobs"] == []
    out.mkdir()
    with lock_folder(out):
        write_run(out, 10, None, NAMES)
        page = LivePage(out)
        assert page.news(-1)["status"] == "running"
        lock = (out / ".lock").read_text()
        (out / ".lock").unlink()  # by somebody who takes it for a leftover
        assert "▶ running" in page.html()
    (out / ".lock").write_text(lock)  # what a killed process leaves
    html = page.html()
    assert "◼ broken off" in html and "◼ stopped" in html and "▶ running" not in html
    (out / ".lock").write_text("another-machine 7\n")  # which shares the folder
    assert "▶ running" in page.html()
    (out / ".lock").unlink()
    write_run(out, 10, "done", NAMES)
    news = page.news(1)
    assert news["status"] == "done" and {job["status"] for job in news["jobs"]} == {"done"}


def test_watching_writes_nothing(ask: Ask, folder: Path) -> None:
    def state() -> dict[str, Any]:
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes())
            for path in folder.parent.rglob("*")
            if path.is_file()
        }

    before = state()
    ask("/")
    ask("/data?look=-1")
    assert state() == before


def test_files_of_any_content_end_in_an_answer(ask: Ask, folder: Path) -> None:
    odd = [
        {"job": ["x"], "step": 1}, {"job": "one", "step": "2"}, {"job": "one", "step": 1e400},
        {"job": "one", "step": 3, "loss": 10**400}, {"job": "__proto__", "step": 1, "loss": 1.0},
        {"job": "one", "step": 4, "tokens": "many", "elapsed": [], "loss": True},
        {"job": "one", "step": 5, "loss": "\ud800"}, {"job": "one", "step": 6, **{f"m{n}": n for n in range(500)}},
    ]  # fmt: skip
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(lines(odd) + "[" * 100_000 + "\n" + "9" * 10_000 + "\n")
    texts = [{"job": "one", "step": 1, "samples": [3, {"prompt": "\ud800"}]}, {"job": "one", "step": 2, "samples": 1}]
    (folder / "samples.jsonl").write_text(lines(texts))
    (folder / "windows.jsonl").unlink()
    os.mkfifo(folder / "windows.jsonl")
    assert ask("/")[0] == ask("/data?look=-1")[0] == 200
    (folder / "run.json").write_text('{"config": {"jobs": 3}}')
    assert ask("/data?look=-1")[0] == 500  # and the server goes on
    (folder / "run.json").write_text("{}")
    assert ask("/data?look=-1")[0] == 200


def test_a_folder_in_the_place_of_a_log_is_taken_for_no_log_and_leaves_no_handle_open(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    with opened(folder / "metrics.jsonl") as file:
        assert file is None
    assert before == (os.listdir("/proc/self/fd") if before else [])
    data = PageData(FollowedRun(folder))
    data.follow()
    assert [job["steps"] for job in data.numbers()["jobs"]] == [None, None]


# --- long runs -------------------------------------------------------------------------------------------------------------


def test_a_long_series_becomes_few_means_with_their_lowest_and_highest() -> None:
    thin, values = Thinned(("step",), 50), [((n * 7919) % 1000) / 10 for n in range(1, 1338)]
    for number, value in enumerate(values, 1):
        thin.add([number], {"loss": value})
    found = thin.columns()
    assert found is not None
    size = found["every"]
    assert size == 32 and len(found["step"]) == -(-len(values) // size) <= 50
    for at, last in enumerate(found["step"]):
        part = values[at * size : (at + 1) * size]
        assert last == min((at + 1) * size, len(values)) and found["count"][at] == len(part)
        assert found["mean"]["loss"][at] == pytest.approx(sum(part) / len(part), rel=1e-5)
        assert (found["low"]["loss"][at], found["high"]["loss"][at]) == (min(part), max(part))


# --- several runs ----------------------------------------------------------------------------------------------------------


def test_runs_side_by_side_have_all_their_jobs_in_one_page_and_a_page_each(folder: Path, tmp_path: Path) -> None:
    other, same = tmp_path / "other", tmp_path / "elsewhere" / "out"
    other.mkdir()
    write_run(other, 5, "done", ("two", "three"))
    page = LivePage(folder, other)
    html = page.html()
    news = page.news(-1)
    assert [job["name"] for job in news["jobs"]] == ["out / one", "out / two", "other / two", "other / three"]
    assert [job["style"] for job in news["jobs"]] == ["job-0", "job-1", "job-2", "job-3"]
    assert [job["status"] for job in news["jobs"]] == ["running", "running", "done", "done"]
    alone = [LivePage(at).news(-1)["jobs"][job]["steps"]["step"] for at in (folder, other) for job in (0, 1)]
    assert [job["steps"]["step"] for job in news["jobs"]] == alone
    for text in ("<title>out, other · packlora</title>", "<a href='1/'>out</a>", "<a href='2/'>other</a>"):
        assert text in html
    look = news["look"]
    assert page.news(look) == {"look": look}
    with (other / "metrics.jsonl").open("a") as file:
        file.write(lines([step("three", 6)]))
    assert page.news(look)["jobs"][3]["steps"]["step"][-1] == 6
    same.mkdir(parents=True)
    assert {f"{folder} / one", f"{same} / one"} & {job["name"] for job in LivePage(folder, same).news(-1)["jobs"]}


def test_the_server_of_several_runs_answers_for_all_and_for_each(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_run(other, 5, "done", ("three",))
    with Server([folder, other], 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

        def jobs(path: str) -> Any:
            connection = http.client.HTTPConnection(HOST, server.server_port, timeout=SECONDS)
            connection.request("GET", f"{path}data?look=-1")
            answer = connection.getresponse()
            body = answer.read()
            return [job["name"] for job in json.loads(body)["jobs"]] if answer.status == 200 else answer.status

        assert jobs("/") == ["out / one", "out / two", "other / three"]
        assert (jobs("/1/"), jobs("/2/")) == (["one", "two"], ["three"])
        assert {jobs(path) for path in ("/0/", "/3/", "/01/", "/1", "/-1/", "/1/2/")} == {404}
        server.shutdown()


# --- the commands ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_watching_with_a_line(folder: Path) -> None:
    command = [sys.executable, "-m", "packlora", "watch", str(folder), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        port = int(first.split("http://127.0.0.1:")[1].split("/")[0])
        connection = http.client.HTTPConnection(HOST, port, timeout=SECONDS)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=SECONDS) == ("watching has ended\n", "")
        assert process.returncode == 0


def test_report_writes_the_page_of_a_killed_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(SystemExit) as ended:
        app(["report", str(out)])
    assert ended.value.code == 2 and "holds no run" in capsys.readouterr().err
    write_run(out, 10, None, NAMES)
    with pytest.raises(SystemExit) as ended:
        app(["report", str(out)])
    assert ended.value.code == 0 and capsys.readouterr().out == f"report: {out / 'report.html'}\n"
    assert "◼ broken off" in (out / "report.html").read_text()
