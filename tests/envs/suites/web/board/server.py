"""A small web application: a board of cards by session, with an HTTP interface to its state.

GET /?sid=S                 the page
GET /state?sid=S            {"cards": [{"title", "list"}], "users": [...], "notes": "..."}
POST /state?sid=S           replaces the state
POST /move?sid=S            {"title", "list"}: moves a card, as the page does
GET /slow?ms=N              answers late
GET /broken                 status 500
GET /die                    ends the server
GET /hang                   never answers
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

HERE = Path(__file__).parent
START = {"cards": [], "users": ["Ann", "Bo"], "notes": ""}
STATES: dict[str, dict[str, Any]] = {}


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        match parts.path:
            case "/state":
                self._json(self._state(query))
            case "/slow":
                time.sleep(int(query["ms"]) / 1000)
                self._json({"slow": True})
            case "/broken":
                self._send(b"it broke", status=500)
            case "/die":
                os._exit(3)
            case "/hang":
                time.sleep(3600)
            case "/report.csv":
                self._send(b"a,b\n1,2\n", "text/csv", attachment=True)
            case path:
                name = path.strip("/") or "index.html"
                page = HERE / name
                if page.suffix == ".html" and page.is_file() and page.parent == HERE:
                    self._send(page.read_bytes(), "text/html; charset=utf-8")
                else:
                    self._send(b"not there", status=404)

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self._state(query)
        match parts.path:
            case "/state":
                STATES[query["sid"]] = {**START, **body}
            case "/move":
                for card in state["cards"]:
                    if card["title"] == body["title"]:
                        card["list"] = body["list"]
            case "/notes":
                state["notes"] = body["notes"]
            case "/add":
                state["cards"].append({"title": body["title"], "list": "Inbox"})
            case "/users":
                state["users"] = body["users"]
        self._json(self._state(query))

    def log_message(self, *_: object) -> None:
        """Write nothing for a request."""

    def _state(self, query: dict[str, str]) -> dict[str, Any]:
        return STATES.setdefault(query.get("sid", ""), json.loads(json.dumps(START)))

    def _json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), "application/json")

    def _send(
        self, body: bytes, kind: str = "text/plain", *, status: int = 200, attachment: bool = False
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if attachment:
            self.send_header("Content-Disposition", 'attachment; filename="report.csv"')
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    sys.stderr.write(f"board at port {port}\n")
    server.serve_forever()


if __name__ == "__main__":
    main()
