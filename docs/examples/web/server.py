"""A small web application, a list of guests: `python server.py PORT`, then http://127.0.0.1:PORT/?sid=me.

Each session `sid` has a state of its own, which training sets and reads:

    GET  /state?sid=S   {"guests": [...], "invited": "", "dinner": "Fish", "answers": ["Send", "Cancel"]}
    POST /state?sid=S   begins anew with the parts that the body has, and the usual others

The page index.html shows the state, and changes it by POST /add, /invite and /dinner.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

USUAL = {
    "guests": ["Anna", "Clara", "Felix"],
    "invited": "",
    "dinner": "Fish",
    "answers": ["Send", "Cancel"],  # the buttons of the dialog, from left to right
}
MOST_SESSIONS = 1000
PAGE = (Path(__file__).parent / "index.html").read_bytes()

sessions = {}  # sid -> state, the oldest first


def change(state, path, value):
    """Do what the page asks for."""
    if path == "/add":
        state["guests"] = [*state["guests"], value["guest"]]
    elif path == "/invite":
        state["invited"] = value["guest"]
    elif path == "/dinner":
        state["dinner"] = value["dinner"]


class Handler(BaseHTTPRequestHandler):
    """Serve the page, and requests that set and read its state."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path, sid = self.place()
        if path == "/":
            self.answer(200, "text/html; charset=utf-8", PAGE)
        elif path == "/state":
            self.answer_json(sessions.get(sid, USUAL))
        else:
            self.answer(404, "text/plain", b"no such page")

    def do_POST(self):
        path, sid = self.place()
        value = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = dict(USUAL | value if path == "/state" else sessions.get(sid, USUAL))
        change(state, path, value)
        sessions[sid] = state
        while len(sessions) > MOST_SESSIONS:
            del sessions[next(iter(sessions))]
        self.answer_json(state)

    def place(self):
        parts = urlsplit(self.path)
        return parts.path, parse_qs(parts.query).get("sid", [""])[0]

    def answer_json(self, value):
        self.answer(200, "application/json", json.dumps(value).encode())

    def answer(self, status, kind, body):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Print nothing for each request."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
