"""A real HTTP server that answers chat requests as a test says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Says = Callable[[dict[str, Any]], str | int]
"""The body of a request -> the text of an answer, or a status that is none."""


@contextmanager
def chat(says: Says) -> Iterator[str]:
    """Its base URL while it serves."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = says(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            content = {
                "choices": [{"message": {"role": "assistant", "content": str(text)}}],
                "usage": {"prompt_tokens": 100, "completion_tokens": 7},
            }
            answer = json.dumps(content).encode()
            self.send_response(text if isinstance(text, int) else 200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

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
