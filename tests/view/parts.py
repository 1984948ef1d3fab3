"""A server on a real socket, a run to look at, and the elements of a page, for the viewer's tests."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image

from bus.messages import Outcome, StepRecord
from dart_cli.data.ledger import Ledger
from dart_cli.runtime.http_server import make_server
from dart_cli.view.server import MOST_REQUESTS, make_app
from envs.contract.blobs import content_hash
from tests.copies import copy_with
from tests.data.parts import ask_lease, step_record, trajectory_end
from tests.waiting import PATIENCE_S, wait_until


@dataclass(frozen=True)
class Answer:
    """An answer of the server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass(frozen=True)
class Server:
    """A viewer that serves."""

    port: int

    def get(self, path: str, *, method: str = "GET", **headers: str) -> Answer:
        """Ask for a path exactly as it is written; `Host` is replaced where it is given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host="Host" in headers)
            for key, value in headers.items():
                connection.putheader(key, value)
            connection.endheaders()
            answer = connection.getresponse()
            answer_headers = {key.lower(): value for key, value in answer.getheaders()}
            return Answer(answer.status, answer_headers, answer.read())

    def page(self, path: str) -> str:
        """Return the text of a page, which must exist."""
        answer = self.get(path)
        assert answer.status == 200, (path, answer.text)
        return answer.text


@contextlib.contextmanager
def serving(run_dir: Path, *, host: str = "127.0.0.1", token: str = "") -> Iterator[Server]:
    """Serve a run on loopback until the end of the block."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = make_server(make_app(run_dir, host=host, token=token), MOST_REQUESTS)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started, "the server's start")
    try:
        yield Server(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listener.close()


def png(width: int = 320, height: int = 200, colour: str = "teal") -> bytes:
    """Return a screenshot of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def shown_step(trajectory_id: str, step: int, **changes: object) -> StepRecord:
    """Return a step whose screenshot can be shown, with some of its fields changed."""
    image = png()
    record = step_record(trajectory_id, step)
    fields = {"screenshot": image, "image_hashes": [content_hash(image)]}
    return copy_with(record, **(fields | changes))


def play_shown(
    ledger: Ledger, slot: int, outcome: Outcome = "pass", *, steps: int = 2, **changes: object
) -> str:
    """Play one trajectory whose screens can be shown; returns its id."""
    lease = ask_lease(ledger, slot)
    for step in range(steps):
        assert ledger.step(shown_step(lease.trajectory_id, step, **changes)).accepted
    end = trajectory_end(lease.trajectory_id, steps, outcome)
    ledger.end(end.model_copy(update={"screenshot": png(colour="navy")}))
    return lease.trajectory_id


@dataclass
class Bones(HTMLParser):
    """A page without its text: which elements with which attributes, in order."""

    elements: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    links: list[str] = field(default_factory=list)  # values of href, src, action, ...
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(sorted(name for name, _ in attrs))))
        pointing = {"href", "src", "action", "srcset", "xlink:href", "data", "poster", "formaction"}
        self.links += [value or "" for name, value in attrs if name in pointing]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @classmethod
    def of(cls, page: str) -> Bones:
        bones = cls()
        bones.feed(page)
        bones.close()
        return bones

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())
