"""Who may look: loopback by its own names alone, everybody else with the token."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.errors import UserError
from dart_cli.cli.main import main
from dart_cli.data.store.open import open_store
from dart_cli.runtime.http_server import listen
from dart_cli.view.server import FIRST_PORT
from tests.data.parts import make_ledger, play, small_config
from tests.view.parts import Bones, Server, serving

TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config(tmp_path_factory.mktemp("runs") / "run")
    with open_store(config.run.dir) as store:
        play(make_ledger(config, store), 0)
    return config.run.dir


@pytest.fixture(scope="module")
def loopback(run_dir: Path) -> Iterator[Server]:
    with serving(run_dir) as server:
        yield server


@pytest.fixture(scope="module")
def beyond(run_dir: Path) -> Iterator[Server]:
    with serving(run_dir, host="0.0.0.0", token=TOKEN) as server:
        yield server


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:1", "LOCALHOST:8080", "[::1]:8470", "[::1]"]
)
def test_loopback_is_answered_by_its_names_through_any_tunnel(host: str, loopback: Server) -> None:
    assert loopback.get("/", Host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8470",
        "127.0.0.1.evil.example",
        "localhost.",
        "10.0.0.7",
        "",
        "localhost@evil.example",
        "::1",
        "localhost:80:80",
    ],
)
def test_another_name_is_refused(host: str, loopback: Server) -> None:
    assert loopback.get("/", Host=host).status == 421
    assert loopback.get("/screenshots/x", Host=host).status == 421


def test_beyond_loopback_an_address_will_do_but_no_foreign_name(beyond: Server) -> None:
    assert beyond.get("/", Host="10.0.0.7:8470").status == 403  # known, but without the token
    assert beyond.get(f"/?token={TOKEN}", Host="rebound.example").status == 421


@pytest.mark.parametrize("path", ["/", "/view.css", "/trajectories", "/nothing", "/?token="])
def test_beyond_loopback_nothing_is_served_without_the_token(path: str, beyond: Server) -> None:
    for answer in (
        beyond.get(path),
        beyond.get(path.partition("?")[0] + "?token=wrong"),
        beyond.get(path.partition("?")[0] + "?token=%ff%c3%a9"),
        beyond.get(path, Cookie="dart-view=wrong"),
        beyond.get(path, Cookie='dart-view="; ;==;'),
    ):
        assert answer.status == 403
        assert b"g000001" not in answer.body


def test_the_token_becomes_a_cookie_and_leaves_the_address(beyond: Server) -> None:
    answer = beyond.get(f"/trajectories?state=finished&token={TOKEN}")
    assert answer.status == 303
    assert answer.headers["location"] == "/trajectories?state=finished"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert beyond.get("/", Cookie=cookie.partition(";")[0]).status == 200
    name = cookie.partition("=")[0]
    assert beyond.get("/", Cookie=f"{name}=wrong").status == 403
    assert beyond.get("/", Cookie=f"dart-view-other=x; {name}={TOKEN}").status == 200
    assert beyond.get(f"//evil.example/?token={TOKEN}").headers["location"] == "/evil.example/"


@pytest.mark.parametrize("path", ["/", "/view.css", "/nothing", "/trajectories?page=x"])
def test_every_answer_forbids_scripts_frames_and_foreign_content(
    path: str, loopback: Server
) -> None:
    headers = loopback.get(path).headers
    policy = headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "img-src 'self'", "style-src 'self'"} <= set(policy)
    assert "frame-ancestors 'none'" in policy
    assert "script" not in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_is_written(method: str, loopback: Server) -> None:
    assert loopback.get("/", method=method).status == 405


def test_head_is_answered_without_a_body(loopback: Server) -> None:
    answer = loopback.get("/", method="HEAD")
    assert (answer.status, answer.body) == (200, b"")


# --- the verb -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [("--host", "0.0.0.0"), ("--token",)])
def test_the_verb_prints_address_and_token_serves_and_ends_by_a_signal(
    options: tuple[str, ...], run_dir: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dart_cli", "view", run_dir, "--port", "0", *options],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    with process:
        try:
            assert process.stderr is not None
            told = re.search(r"http://[^/]+:(\d+)/\?token=([\w-]{20,})", process.stderr.readline())
            assert told is not None
            server = Server(int(told[1]))
            assert server.get("/").status == 403
            assert server.get(f"/?token={told[2]}").status == 303
            process.send_signal(signal.SIGINT)
            assert process.wait(20) in (0, 130)
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_a_taken_port_is_one_line_and_without_a_port_the_next_one_is_taken(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        listen("127.0.0.1", None, FIRST_PORT) as first,
        listen("127.0.0.1", None, FIRST_PORT) as second,
    ):
        taken = first.getsockname()[1]
        assert second.getsockname()[1] != taken
        with pytest.raises(SystemExit) as exit_:
            main(["view", str(run_dir), "--port", str(taken)])
        assert exit_.value.code == 2
        assert "name a free one, or --port 0 for any" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"--host no\.such\.host"):
        listen("no.such.host.invalid", 0, FIRST_PORT)
    with pytest.raises(UserError, match=r"--host a\.\.b is not a host name"):
        listen("a..b", 0, FIRST_PORT)


def test_the_verb_exports(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> int:
        with pytest.raises(SystemExit) as exit_:
            main(["view", str(run_dir), *map(str, arguments)])
        return int(exit_.value.code or 0)

    file = tmp_path / "a.html"
    assert run("--export", file, "--trajectory", "g000001-00") == 0
    assert "open it in a browser" in capsys.readouterr().out
    assert "g000001-00" in Bones.of(file.read_text()).text
    for words, cure in (
        (["--trajectory", "g000001-00"], "add --export FILE.html"),
        (["--export", tmp_path], "name a file in a folder that exists"),
        (["--export", "."], "name a file in a folder that exists"),
        (["--export", "/"], "name a file in a folder that exists"),
        (["--export", file, "--trajectory", "g1"], "group g000001 has"),
        (["--export", tmp_path / "no" / "a.html"], f"there is no folder {tmp_path}/no"),
    ):
        assert run(*words) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert cure in err


def test_a_missing_package_is_named_with_its_cure(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for ours in ("dart_cli.view.server", "dart_cli.runtime.http_server"):
        monkeypatch.delitem(sys.modules, ours, raising=False)
    with pytest.raises(SystemExit) as exit_:
        main(["view", str(run_dir)])
    assert exit_.value.code == 2
    assert "pip install -e '.[view]'" in capsys.readouterr().err
