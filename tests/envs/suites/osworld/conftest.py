"""A guest for tests: OSWorld's routes (guest_server.py) on an Xvfb, a web server of
files, and a window that logs its events.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from envs.suites.osworld import downloads
from tests.waiting import PATIENCE_S

HERE = Path(__file__).parent


class XGuest:
    """A guest server on its own display.

    One that `leaks` leaves a connection open for each screenshot, as OSWorld's does, on a display
    that takes 64 clients.
    """

    def __init__(self, home: Path, *, leaks: bool = False) -> None:
        self.home = home
        self.processes: list[subprocess.Popen[bytes]] = []
        display = self.start(
            *("Xvfb", "-displayfd", "1", "-screen", "0", "800x600x24", "-nolisten", "tcp"),
            "-noreset",  # else it restarts, and refuses connections, whenever its last client leaves
            *(("-maxclients", "64") if leaks else ()),
            says=True,
        )
        self.display = f":{display}"
        port = self.start(
            *(sys.executable, str(HERE / "guest_server.py"), self.display, str(home)),
            *(("leaks",) if leaks else ()),
            says=True,
        )
        self.url = f"http://127.0.0.1:{port}"

    def start(self, *command: str, says: bool = False) -> str:
        """Start a program on this display; its first line, if it prints one."""
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE if says else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "DISPLAY": getattr(self, "display", ""), "HOME": str(self.home)},
            start_new_session=True,
        )
        self.processes.append(process)
        if not says:
            return ""
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], PATIENCE_S)[0]:
            pytest.fail(f"{command[0]} printed nothing in {PATIENCE_S:g} s")
        return process.stdout.readline().decode().strip()

    def end(self) -> None:
        for process in reversed(self.processes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


class Web:
    """A server of files: `files` by path; /cut breaks off, /busy answers 503 twice, all else 404."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.files = {"/whole": b"pears"}
        web = self

        class Routes(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked.append(self.path)
                busy = self.path == "/busy" and len(web.asked) < 3
                body = web.files.get(self.path.replace("busy", "whole").replace("cut", "whole"))
                self.send_response(503 if busy else 404 if body is None else 200)
                body = b"" if busy or body is None else body
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[:2] if self.path == "/cut" else body)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        serve = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        serve.start()

    def end(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Window:
    """What reaches the window of x_window.py."""

    def __init__(self, guest: XGuest) -> None:
        with tempfile.NamedTemporaryFile(dir=guest.home, delete=False) as log:
            self._log = Path(log.name)
        guest.start(sys.executable, str(HERE / "x_window.py"), str(self._log))
        self._process = guest.processes[-1]
        self._read = 0
        self.wait_for(lambda events: ["ready"] in events)

    def events(self) -> list[list[object]]:
        """Those since the last call."""
        lines = self._log.read_text().split("\n")[:-1]
        new, self._read = lines[self._read :], len(lines)
        return [json.loads(line) for line in new]

    def wait_for(self, holds: object) -> list[list[object]]:
        """The events until `holds` of them is true."""
        events: list[list[object]] = []
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            events += self.events()
            if holds(events):  # type: ignore[operator]
                return events
            time.sleep(0.01)
        pytest.fail(f"the window saw only {events}")

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="session")
def xguest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[XGuest]:
    if shutil.which("Xvfb") is None:
        pytest.skip("no Xvfb: apt install xvfb")
    for package in ("urllib3", "Xlib"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package}: pip install -e '.[osworld,desktop]'")
    guest = XGuest(tmp_path_factory.mktemp("home"))
    yield guest
    guest.end()


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(downloads, "AGAIN_S", 0.01)
    web = Web()
    yield web
    web.end()


@pytest.fixture(scope="module")
def one_window(xguest: XGuest) -> Iterator[Window]:
    window = Window(xguest)
    yield window
    window.close()


@pytest.fixture
def window(one_window: Window) -> Window:
    """The module's window, which has forgotten what reached it before."""
    one_window.events()
    return one_window
