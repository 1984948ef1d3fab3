"""Promises of set-up steps: files from the web are whole, kept, and reach the guest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bus.errors import EnvError
from envs.osworld.evaluator_process import EvaluatorProcess
from envs.osworld.guest import Guest, read_address
from envs.osworld.setup import EpisodeContext, fetch, prepare
from envs.taskfile import SetupStep


class Web:
    """A server of files: /whole, /cut (which breaks off), all else missing."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        web = self

        class Routes(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked.append(self.path)
                known = self.path in ("/whole", "/cut")
                self.send_response(200 if known else 404)
                self.send_header("Content-Length", "5" if known else "0")
                self.end_headers()
                if known:
                    self.wfile.write(b"pears" if self.path == "/whole" else b"pe")

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        serve = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        serve.start()

    def end(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()
    yield web
    web.end()


def test_a_file_is_fetched_once(web: Web, tmp_path: Path) -> None:
    for _ in range(2):
        assert fetch(f"{web.url}/whole", tmp_path / "kept") == b"pears"
    assert web.asked == ["/whole"]
    assert len(list((tmp_path / "kept").iterdir())) == 1


@pytest.mark.parametrize(
    ("path", "told"),
    [("/cut", "broke off 3 bytes before its end"), ("/none", "cannot fetch .*404")],
)
def test_an_incomplete_file_is_not_kept(web: Web, tmp_path: Path, path: str, told: str) -> None:
    with pytest.raises(EnvError, match=told):
        fetch(f"{web.url}{path}", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a/b", "", "http://a b/c"])
def test_only_web_addresses_are_fetched(tmp_path: Path, url: str) -> None:
    with pytest.raises(EnvError):
        fetch(url, tmp_path)


@pytest.fixture
def context(tmp_path: Path) -> Iterator[EpisodeContext]:
    evaluator = EvaluatorProcess("", 5.0)
    yield EpisodeContext(tmp_path, tmp_path / "kept", (800, 600), "secret", evaluator)
    evaluator.close()


def test_steps_have_their_documented_effects(
    xguest: Any, web: Web, context: EpisodeContext
) -> None:
    guest = Guest(read_address(xguest.url))
    path = str(xguest.home / "fruit.txt")
    filled = ["echo", "{SCREEN_WIDTH}x{SCREEN_HEIGHT_HALF} {CLIENT_PASSWORD}"]
    steps = [
        SetupStep("download", {"files": [{"url": f"{web.url}/whole", "path": path}]}),
        SetupStep("execute", {"command": filled, "stdout": "../../said.txt"}),
        SetupStep("sleep", {"seconds": 0}),
    ]
    prepare(steps, guest, context)
    assert guest.read_file(path) == b"pears"
    # Only its name counts: a task file writes only into the episode's folder.
    assert (context.folder / "said.txt").read_text() == "800x300 secret\n"
    guest.close()


def test_a_refusal_is_ignored_only_before_an_evaluation(
    xguest: Any, context: EpisodeContext
) -> None:
    guest = Guest(read_address(xguest.url))
    steps = [SetupStep("activate_window", {"window_name": "none"})]
    prepare(steps, guest, context, lenient=True)
    with pytest.raises(EnvError, match=r"set-up step 0 \(activate_window\): .*none not found"):
        prepare(steps, guest, context)
    guest.close()
