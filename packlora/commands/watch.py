"""packlora watch and packlora report: the page of a run, or of several side by side, served while it trains, or written again.

The server answers on this machine's own address alone, reads the run's folder and writes nothing. A page of another site in the
same browser can reach such an address, by a name of its own too (DNS rebinding): requests whose Host or origin is not ours are
refused. Neither command loads torch.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.client import HTTP_PORT
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from packlora.errors import InputError, reason_of
from packlora.report.follow import read_object
from packlora.report.live_page import LivePage
from packlora.report.page import policy
from packlora.report.report import write_report
from packlora.run_file import load_run
from packlora.terminal import say, show

HOST = "127.0.0.1"
ASKED = re.compile(r"look=(-?\d{1,15})", re.ASCII)
PATH = re.compile(r"/(?:([1-9]\d{0,2})/)?(data)?", re.ASCII)
"""Path of the page and of its numbers; with a number in front, of one of several runs."""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def output_folder(run: Path) -> Path:
    """The output folder of a run, which is named by itself or by its run file. It may not be there yet.

    Raises:
        InputError: it is another kind of file, or a run file that cannot be read.
    """
    if run.suffix in (".yaml", ".yml") and not run.is_dir():
        return Path(load_run(run).output_dir)
    if run.exists() and not run.is_dir():
        raise InputError(f"{run} is neither the output folder of a run nor a run file (.yaml)")
    return run


def report_again(run: Path) -> Path:
    """Write report.html of a run anew, and return its path.

    Raises:
        InputError: there is no run, or its files hold what no run writes.
    """
    folder = output_folder(run)
    if not any((folder / name).is_file() for name in ("run.json", "metrics.jsonl")):
        raise InputError(f"{folder} holds no run: there is neither run.json nor metrics.jsonl")
    record = folder / "run.json"
    if record.exists() and read_object(record) is None:
        say(f"note: {record} holds no JSON object, so the page lacks what it says; the logs beside it are shown")
    try:
        return write_report(folder)
    except OSError:
        raise
    except Exception as error:  # files of a folder may hold anything
        raise InputError(
            f"{folder}: run.json, or a log beside it, holds what no run writes there ({reason_of(error)}); put the run's own "
            "files back"
        ) from error


def own_names(port: int) -> set[str]:
    """Host headers that a browser sends to a server on this machine; it leaves the default port out."""
    return {
        f"{name}{end}" for name in (HOST, "localhost") for end in [f":{port}", *([""] if port == HTTP_PORT else [])]
    }


class Server(ThreadingHTTPServer):
    """Serves the page of a run; with several, a page on which they stand side by side and one of each.

    Args:
        folders: output folders of the runs.
        port: 0 takes a free one.

    Raises:
        InputError: the port is taken, or may not be used.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int) -> None:
        self.pages = [LivePage(*folders), *(LivePage(folder) for folder in folders if len(folders) > 1)]
        self.one_at_a_time = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise InputError(f"--port {port}: {error.strerror}; leave it out for a free one") from None
        self.own = own_names(self.server_port)

    @property
    def url(self) -> str:
        """URL of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def server_bind(self) -> None:
        """Bind the socket as the base class does, but without looking up the host name of the address."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = HOST, self.socket.getsockname()[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a reader that disconnects in the middle."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "packlora", ""
    timeout = 60

    def do_GET(self) -> None:
        if (refused := self._refused()) is not None:
            self._answer(refused, "text/plain", f"{refused.phrase}\n")
            return
        path, _, query = self.path.partition("?")
        place, asked = PATH.fullmatch(path), ASKED.fullmatch(query)
        number = int(place[1] or 0) if place is not None else len(self.server.pages)
        page = self.server.pages[number] if number < len(self.server.pages) else None
        if page is not None and place is not None and not place[2] and not query:
            self._answer_with("text/html", page.html)
        elif page is not None and place is not None and place[2] and asked is not None:
            self._answer_with("application/json", lambda: json.dumps(page.news(int(asked[1])), allow_nan=False))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "Not Found\n")

    do_HEAD = do_GET

    def _answer_with(self, kind: str, made: Callable[[], str]) -> None:
        """Answer with the result of `made`, or with its error: the files of a folder may hold anything."""
        try:
            with self.server.one_at_a_time:
                text = made()
        except Exception as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{type(error).__name__}: {error}\n")
            return
        self._answer(HTTPStatus.OK, kind, text)

    def _refused(self) -> HTTPStatus | None:
        """HTTP status with which a request is refused that comes neither from the page itself nor from a user who opens it;
        None otherwise."""
        hosts, origin = self.headers.get_all("Host") or [], self.headers.get("Origin")
        if len(hosts) != 1 or hosts[0].lower() not in self.server.own or not self.path.startswith("/"):
            return HTTPStatus.FORBIDDEN
        if origin is not None and origin.removeprefix("http://") not in self.server.own:
            return HTTPStatus.FORBIDDEN
        if self.headers.get("Sec-Fetch-Site", "none") == "cross-site" and self.path != "/":
            return HTTPStatus.FORBIDDEN
        return None

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", f"{policy(is_live=True)}; frame-ancestors 'none'")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not told."""


def watch(runs: Sequence[Path], port: int, browser: bool) -> None:
    """Serve the page of a run, or of several side by side, until Ctrl-C.

    Args:
        runs: their output folders, or their run files.
        port: 0 for a free one.
        browser: open the page in the user's browser, if there is one.

    Raises:
        InputError: there can be no such run, or the port cannot be used.
    """
    folders = list(dict.fromkeys(map(output_folder, runs)))
    with Server(folders, port) as server:
        named = ", ".join(map(str, folders))
        show(f"the page of {named} is at {server.url} (Ctrl-C ends; the {'runs go' if folders[1:] else 'run goes'} on)")
        for folder in folders:
            if not folder.is_dir():
                say(f"{folder} is not there yet; the page shows the run when it begins")
        if browser:
            threading.Thread(target=_open, args=(server.url,), daemon=True).start()
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            show("watching has ended")


def _open(url: str) -> None:
    """Text browsers, which would take the terminal, are left alone."""
    try:
        found = webbrowser.get()
        if not isinstance(found, webbrowser.GenericBrowser) or isinstance(found, webbrowser.BackgroundBrowser):
            found.open(url)
    except webbrowser.Error:
        pass
