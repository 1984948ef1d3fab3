"""A small web application, a guest list: `python server.py PORT`, then http://127.0.0.1:PORT/?sid=me.

Each session `sid` has a state of its own, which tests and training set and read:

    POST /begin?sid=S   {"seed": 7, "guest": "Clara"}: a new list with this guest, drawn by the seed
    GET  /state?sid=S   the state: {"guests": [...], "invited": "", "dinner": "Fish", "answers": [...]}

The page index.html shows it, and changes it by POST /add, /invite and /dinner.
"""

import json
import random
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

NAMES = "Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Kira Lukas Maria Nils Olga Peter".split()
DINNERS = ["Fish", "Pasta", "Salad", "Soup"]
MOST_SESSIONS = 1000
PAGE = (Path(__file__).parent / "index.html").read_bytes()

sessions = {}  # sid -> state, the oldest first


def begin(seed=0, guest="Anna", dinner=""):
    """Return a new state: four guests, a dinner that is not `dinner`, the dialog's answers in an order."""
    rng = random.Random(seed)
    guests = rng.sample([name for name in NAMES if name != guest], k=3)
    guests.insert(rng.randrange(4), guest)
    chosen = rng.choice([other for other in DINNERS if other != dinner])
    answers = rng.sample(["Send", "Cancel"], k=2)
    return {"guests": guests, "invited": "", "dinner": chosen, "answers": answers}


def change(state, path, value):
    """Do what the page asks for."""
    if path == "/add" and value["guest"].strip():
        state["guests"].append(value["guest"].strip())
    elif path == "/invite":
        state["invited"] = value["guest"]
    elif path == "/dinner":
        state["dinner"] = value["dinner"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path, sid = self.place()
        if path == "/":
            self.answer(200, "text/html; charset=utf-8", PAGE)
        elif path == "/state":
            self.answer_json(sessions.setdefault(sid, begin()))
        else:
            self.answer(404, "text/plain", b"no such page")

    def do_POST(self):
        path, sid = self.place()
        value = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if path == "/begin":
            sessions[sid] = begin(**value)
            while len(sessions) > MOST_SESSIONS:
                del sessions[next(iter(sessions))]
        else:
            change(sessions[sid], path, value)
        self.answer_json(sessions[sid])

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
