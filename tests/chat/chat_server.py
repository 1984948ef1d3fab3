"""A real HTTP server that answers chat requests as a test says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

USAGE = {"prompt_tokens": 100, "completion_tokens": 7}


@dataclass(frozen=True)
class Raw:
    """An answer byte for byte."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def message(content: str | None, finish: str = "stop", **more: Any) -> Raw:
    """Return an answer with more fields in its message."""
    choice = {"message": {"role": "assistant", "content": content, **more}, "finish_reason": finish}
    return Raw(body=json.dumps({"choices": [choice], "usage": USAGE}).encode())


Says = Callable[[dict[str, Any]], str | int | Raw]
"""The body of a request -> the text of an answer, or a status that is none, or a whole answer."""

NO_LIST = Raw(404, b'{"error": "no such place"}')


@contextmanager
def chat(
    says: Says, *, models: Raw = NO_LIST, keys: list[str | None] | None = None
) -> Iterator[str]:
    """Its base URL while it serves. `models` answers a GET; `keys` gets the Authorization headers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(models)

        def do_POST(self) -> None:
            text = says(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if isinstance(text, Raw):
                self.answer(text)
                return
            status = text if isinstance(text, int) else 200
            self.answer(Raw(status, message(str(text)).body))

        def answer(self, raw: Raw) -> None:
            if keys is not None:
                keys.append(self.headers["Authorization"])
            self.send_response(raw.status)
            for name, value in raw.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(raw.body)))
            with suppress(BrokenPipeError, ConnectionResetError):  # the client has gone
                self.end_headers()
                self.wfile.write(raw.body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}/v1"
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join(10)
