"""Promises of a web application that is started, watched and ended, and of requests to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from bus.errors import EnvError
from envs.tools.app_server import AppServer, ask
from tests.waiting import lives, wait_until

SERVER = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            print("something failed", file=sys.stderr, flush=True)
            os._exit(7)
        body = f"{os.getpid()} {child.pid} {os.getcwd()} {os.environ['PORT']} {sys.argv[2]}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
ADDRESS = "http://127.0.0.1:{port}/"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AppServer]:
    (tmp_path / "server.py").write_text(SERVER)
    server = AppServer([sys.executable, "server.py", "{port}", "{folder}"], tmp_path, start_s=600.0)
    yield server
    server.close()


def answer_of(server: AppServer) -> list[str]:
    return ask("GET", ADDRESS.replace("{port}", str(server.port)), deadline_s=600.0).text.split()


def test_a_server_runs_in_its_place_at_a_port_and_with_a_folder_of_its_own(
    server: AppServer, tmp_path: Path
) -> None:
    server.start(ADDRESS)
    pid, child, place, port, folder = answer_of(server)
    assert (place, port, folder) == (str(tmp_path), str(server.port), str(server.folder))
    (server.folder / "left").touch()
    server.start(ADDRESS)
    wait_until(lambda: not lives(int(pid)) and not lives(int(child)))
    again = answer_of(server)
    assert again[0] != pid
    assert again[4] != folder
    assert not Path(folder).exists()
    assert not any(server.folder.iterdir())
    last = server.folder
    server.close()
    wait_until(lambda: not lives(int(again[0])) and not lives(int(again[1])))
    assert not last.exists()


def test_a_server_that_ends_is_reported_with_its_last_line(server: AppServer) -> None:
    server.start(ADDRESS)
    assert server.running
    assert server.why_down() == ""
    with pytest.raises(EnvError, match="GET http"):
        ask("GET", f"http://127.0.0.1:{server.port}/die", deadline_s=600.0)
    wait_until(lambda: not server.running)
    reason = "the server ended with exit code 7; it wrote last: something failed"
    assert server.why_down() == reason
    server.start(ADDRESS)
    assert server.running


def test_a_server_that_does_not_start_is_one_error_with_its_last_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no config, run make')"]
    server = AppServer(command, tmp_path, start_s=600.0)
    with pytest.raises(EnvError, match="exit code 1; it wrote last: no config, run make"):
        server.start(ADDRESS)
    server.close()


def test_a_server_that_does_not_answer_is_one_error_and_is_ended(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import time; print('warming up', flush=True); time.sleep(3600)",
    ]
    server = AppServer(command, tmp_path, start_s=3.0)
    with pytest.raises(EnvError, match=r"no answer from http://127.0.0.1:\d+/ in 3 s"):
        server.start(ADDRESS)
    server.close()
    assert not server.running


def test_a_server_ends_with_its_environment_process_however_that_ends(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    program = f"""
        import sys, time
        from pathlib import Path
        from envs.tools.app_server import AppServer, ask
        server = AppServer([sys.executable, "server.py", "{{port}}", "x"], Path({str(tmp_path)!r}), start_s=600.0)
        server.start({ADDRESS!r})
        print(server.folder, ask("GET", {ADDRESS!r}.replace("{{port}}", str(server.port))).text, flush=True)
        time.sleep(3600)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    folder, *numbers = owner.stdout.readline().split()[:3]
    pids = [int(number) for number in numbers]
    assert all(map(psutil.pid_exists, pids))
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not any(map(lives, pids)) and not Path(folder).exists())


class _Answers(BaseHTTPRequestHandler):
    never = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/never":
            self.never.wait()
            return
        status = 404 if self.path == "/none" else 200
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b'{"a": [1]}' if self.path == "/json" else b"plain")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body + self.headers["Content-Type"].encode())

    def log_message(self, *_: object) -> None:
        """Write nothing."""


def test_a_request_returns_any_status_and_fails_without_a_whole_answer() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    try:
        assert ask("GET", f"{base}/json", deadline_s=600.0).value() == {"a": [1]}
        missing = ask("GET", f"{base}/none", deadline_s=600.0)
        assert (missing.status, missing.value()) == (404, "plain")
        assert ask("POST", base, body=[1], deadline_s=600.0).text == "[1]application/json"
        with pytest.raises(EnvError, match=r"GET http://.*/never: no (whole )?answer in 0\.2 s"):
            ask("GET", f"{base}/never", deadline_s=0.2)
    finally:
        _Answers.never.set()
        server.shutdown()
        server.server_close()
    with pytest.raises(EnvError, match="refused"):
        ask("GET", base, deadline_s=600.0)
