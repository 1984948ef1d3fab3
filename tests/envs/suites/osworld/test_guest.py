"""Promises of the guest's client: every call ends in time, and an invalid answer is an EnvError."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("urllib3", reason="no urllib3: pip install -e '.[osworld]'")

from bus.errors import EnvError, MissingPartError, TaskError
from envs.suites.osworld import guest as guest_module
from envs.suites.osworld.guest import (
    Address,
    DisplayFullError,
    Guest,
    RefusalError,
    UnreachableError,
    read_address,
)

PNG = b"\x89PNG\r\n\x1a\n"


class Odd:
    """A server that answers every request in one way."""

    def __init__(self) -> None:
        self.status, self.body, self.headers = 200, b"", {}
        self.pause_s = 0.0  # before each byte
        self.asked: list[str] = []
        self.stop = threading.Event()
        odd = self

        class Routes(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def serve(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                odd.asked.append(self.path)
                self.send_response(odd.status)
                self.send_header("Content-Length", str(len(odd.body)))
                for name, value in odd.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                for start in range(0, len(odd.body), 1 if odd.pause_s else 1 << 20):
                    odd.stop.wait(odd.pause_s)
                    if odd.stop.is_set():
                        return
                    self.wfile.write(odd.body[start : start + (1 if odd.pause_s else 1 << 20)])

            do_GET = do_POST = serve  # noqa: N815 - http.server's names

            def handle(self) -> None:
                try:
                    super().handle()
                except OSError:
                    odd.stop.wait(0)  # the client gave up, as it should

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def end(self) -> None:
        self.stop.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def odd() -> Iterator[Odd]:
    odd = Odd()
    yield odd
    odd.end()


@pytest.fixture
def guest(odd: Odd) -> Iterator[Guest]:
    guest = Guest(Address("127.0.0.1", odd.server.server_port), deadline_s=1.0)
    yield guest
    guest.close()


CALLS: dict[str, Callable[[Guest], Any]] = {
    "screenshot": lambda guest: guest.screenshot(),
    "screen_size": lambda guest: guest.screen_size(),
    "window_size": lambda guest: guest.window_size("gedit"),
    "cursor_position": lambda guest: guest.cursor_position(),
    "accessibility": lambda guest: guest.accessibility(),
    "execute": lambda guest: guest.execute(["ls"]),
    "list_directory": lambda guest: guest.list_directory("/"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("body", [b"", b"<html>", b"null", b"[]", b'{"width": "x"}', b'{"AT": 3}'])
def test_an_invalid_answer_is_an_error_that_names_the_route(
    odd: Odd, guest: Guest, name: str, body: bytes
) -> None:
    odd.body = body
    with pytest.raises(EnvError, match=f"/{name} "):
        CALLS[name](guest)


@pytest.mark.parametrize("name", CALLS)
def test_a_refusal_has_its_own_error_with_the_servers_text(
    odd: Odd, guest: Guest, name: str
) -> None:
    odd.status, odd.body = 500, b'{"message":\n"no display"}'
    with pytest.raises(RefusalError, match=r'answers 500: \{"message": "no display"\}'):
        CALLS[name](guest)


def test_a_redirect_is_not_followed(odd: Odd, guest: Guest) -> None:
    odd.status, odd.headers = 302, {"Location": "/elsewhere"}
    with pytest.raises(RefusalError, match="302"):
        guest.screenshot()
    assert odd.asked == ["/screenshot"]


def test_a_slow_answer_ends_at_the_deadline(odd: Odd, guest: Guest) -> None:
    odd.body, odd.pause_s = PNG + b"x" * 10_000, 0.2
    with pytest.raises(EnvError, match="no whole answer in 1 s"):
        guest.screenshot()


def test_a_silent_server_ends_at_the_deadline(odd: Odd, guest: Guest) -> None:
    odd.body, odd.pause_s = PNG, 600
    with pytest.raises(EnvError, match="no answer in 1 s"):
        guest.screenshot()


def test_an_endless_answer_is_cut(odd: Odd, guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_module, "MAX_ANSWER_MB", 1)
    odd.body = PNG + bytes(2 << 20)
    with pytest.raises(EnvError, match="more than 1 MiB"):
        guest.screenshot()
    odd.body = PNG
    assert guest.screenshot() == PNG


@pytest.mark.parametrize(
    ("host", "why"), [("127.0.0.1", "Connection refused"), ("no.such.host.invalid", "")]
)
def test_a_refused_connection_is_told_as_such_at_once(host: str, why: str) -> None:
    guest = Guest(Address(host, 9), deadline_s=130.0)
    for call in (lambda: guest.execute(["ls"]), lambda: guest.wait_ready(30.0)):
        began = time.monotonic()
        with pytest.raises(UnreachableError, match="no server answers there") as refused:
            call()
        assert why in str(refused.value)
        assert "no answer in" not in str(refused.value)
        assert time.monotonic() - began < 20
    guest.close()


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://10.0.0.2:5001", "10.0.0.2", 5001),
        ("http://box/", "box", 5000),
        ("http://[::1]:5000", "[::1]", 5000),
        ("http://box?vlc_port=8081", "box", 5000),
    ],
)
def test_a_url_is_an_address(url: str, host: str, port: int) -> None:
    address = read_address(url)
    assert (address.host, address.server_port) == (host, port)


@pytest.mark.parametrize(
    "url",
    ["", "box:5000", "ftp://box", "http://", "http://a/b", "http://a:x", "http://a?port=9"]
    + [f"http://a?vlc_port{value}" for value in ("", "=", "=x", "=0", "=65536")],
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(TaskError, match="http://HOST:PORT"):
        read_address(url)


def test_a_url_names_the_ports_of_browser_and_vlc() -> None:
    address = read_address("http://box:5001?chromium_port=9223&vlc_port=8081")
    assert address == Address("box", 5001, 9223, 8081)
    assert address.url == "http://box:5001"


def test_a_missing_package_names_the_install_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "urllib3", None)
    with pytest.raises(MissingPartError, match=r"pip install -e '\.\[osworld\]'"):
        Guest(Address("127.0.0.1"))


def test_the_guest_on_xvfb_serves_every_route(xguest: Any) -> None:
    guest = Guest(read_address(xguest.url))
    assert guest.screenshot().startswith(PNG)
    assert guest.screen_size() == (800, 600)
    assert len(guest.cursor_position()) == 2
    assert guest.platform() == "Linux"
    assert guest.terminal() == ""
    assert "desktop-frame" in guest.accessibility()
    path = str(xguest.home / "new folder" / "näme; $(x) & 'y'.bin")
    assert guest.read_file(path) is None
    data = bytes(range(256)) * 1000 + b"\r\n--boundary--\r\n"
    guest.upload(path, data)
    assert guest.read_file(path) == data
    assert guest.has_file(path)
    assert not guest.has_file(path + "x")
    tree = guest.list_directory(str(xguest.home / "new folder"))
    assert [each["name"] for each in tree["children"]] == ["näme; $(x) & 'y'.bin"]
    result = guest.execute(
        ["python", "-c", "import sys; print(sys.argv[1:]); sys.exit(3)", "a b", "$x"]
    )
    assert (result.output, result.error, result.returncode) == ("['a b', '$x']\n", "", 3)
    assert guest.execute("echo $((1 + 1))", shell=True).output == "2\n"
    with pytest.raises(RefusalError, match="no-such-program"):
        guest.execute(["no-such-program"])
    guest.close()


def test_a_display_that_takes_no_more_clients_is_told_with_its_cure(
    xguest: Any, tmp_path: Path
) -> None:
    leaking = type(xguest)(tmp_path, leaks=True)
    guest = Guest(read_address(leaking.url))
    try:
        with pytest.raises(DisplayFullError, match="-maxclients 2048"):
            all(guest.screenshot() for _ in range(64))
        began = time.monotonic()
        with pytest.raises(DisplayFullError):
            guest.wait_ready(30.0)
        assert time.monotonic() - began < 20
    finally:
        guest.close()
        leaking.end()


def test_another_refusal_of_the_screen_is_not_taken_for_a_full_display(
    odd: Odd, guest: Guest
) -> None:
    odd.status = 500
    with pytest.raises(RefusalError, match="/screenshot answers 500"):
        guest.screenshot()
