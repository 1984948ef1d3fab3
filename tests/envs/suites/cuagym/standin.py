"""A small stand-in for the folder of CUA-Gym: one mock with its state interface, and bundles.

The mock `notes_mock` shows notes as buttons; a press marks one as done and posts the state. The program in the place
of Vite is one of Python, so that `node` is this interpreter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

SERVER = """
import argparse, json, re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

parser = argparse.ArgumentParser()
parser.add_argument("verb"); parser.add_argument("root", type=Path)
parser.add_argument("--host"); parser.add_argument("--port", type=int)
parser.add_argument("--strictPort", action="store_true")
args = parser.parse_args()
states = Path(".mock-states").resolve()
states.mkdir(exist_ok=True)
DEFAULT = {"notes": [{"text": "Buy milk", "done": False}, {"text": "Call Ann", "done": False}], "log": []}

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def place(self, kind=""):
        sid = re.sub("[^A-Za-z0-9_-]", "", parse_qs(urlsplit(self.path).query).get("sid", ["none"])[0])
        return states / f"{sid}{kind}.json"
    def read(self, kind=""):
        place = self.place(kind)
        return json.loads(place.read_text()) if place.exists() else None
    def answer(self, body, kind="application/json", status=200):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status); self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        match urlsplit(self.path).path:
            case "/go":
                first = self.read(".initial") or self.read() or DEFAULT
                now = self.read() or first
                self.answer({"initial_state": first, "current_state": now, "state_diff": {}})
            case "/state":
                self.answer({"stored_state": self.read(), "has_custom_state": self.read() is not None})
            case "/die":
                import os; os._exit(7)
            case "/":
                self.answer((args.root / "dist" / "index.html").read_bytes(), "text/html")
            case _:
                self.answer({}, status=404)
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["action"] == "reset":
            for kind in ("", ".initial"):
                self.place(kind).unlink(missing_ok=True)
        else:
            kinds = ("", ".initial") if body["action"] == "set" else ("",)
            for kind in kinds:
                self.place(kind).write_text(json.dumps(body["state"]))
        self.answer({"success": True})

ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
"""

PAGE = """<!doctype html><title>notes</title><body style="margin:0"><div id="root"></div><script>
const sid = new URLSearchParams(location.search).get("sid");
localStorage.visits = 1 + Number(localStorage.visits || 0);
(async () => {
  const {stored_state: state} = await (await fetch(`/state?sid=${sid}`)).json();
  if (state && state.blank) return;
  const show = () => {
    root.textContent = "";
    state.notes.forEach((note, index) => {
      const button = document.createElement("button");
      button.textContent = (note.done ? "done " : "") + note.text;
      button.style = `position:absolute;left:0;top:${40 * index}px;width:200px;height:40px`;
      button.onclick = () => {
        note.done = true;
        show();
        fetch(`/post?sid=${sid}`, {method: "POST", body: JSON.stringify({action: "set_current", state})});
      };
      root.append(button);
    });
  };
  show();
})();
</script></body>"""

SETUP = """
import json, subprocess, time, urllib.request, uuid
BASE = "__CUA_GYM_NOTES_URL__"
sid = str(uuid.uuid4())
with open("/tmp/task_web_sid", "w") as file:
    file.write(sid)
state = json.load(urllib.request.urlopen(f"{BASE}/go?sid={sid}"))["current_state"]
PATCH
body = json.dumps({"action": "set", "state": state}).encode()
headers = {"Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(f"{BASE}/post?sid={sid}", data=body, headers=headers))
time.sleep(60)
subprocess.Popen(["google-chrome", f"{BASE}/?sid={sid}"])
"""

REWARD = """
import json, urllib.request
BASE = "__CUA_GYM_NOTES_URL__"
with open("/tmp/task_web_sid") as file:
    sid = file.read().strip()
answer = json.load(urllib.request.urlopen(f"{BASE}/go?sid={sid}"))
done = [note["done"] for note in answer["current_state"]["notes"]]
print(f"{sum(done)} of {len(done)} done")
print(f"REWARD: {sum(done) / len(done)}")
"""

ACTIONS = [{"kind": "click", "x": 20, "y": 20}, {"kind": "click", "x": 20, "y": 60}]


def bundle(**changes: str) -> dict[str, str]:
    """Return the files of a sound bundle, with some of them changed; `patch` changes the first state."""
    about = {"id": "both", "instruction": "Do both notes.", "app_type": "notes_mock"}
    patch = changes.pop("patch", "")
    files = {
        "task.json": json.dumps(about),
        "initial_setup.py": SETUP.replace("PATCH", patch),
        "reward.py": REWARD,
    }
    return files | {
        name.replace("_py", ".py").replace("_json", ".json"): text for name, text in changes.items()
    }


def write_folder(folder: Path, bundles: Mapping[str, Mapping[str, str]]) -> Path:
    """Write a checkout of CUA-Gym-Hub with the mock, built, and the bundles; return it."""
    mock = folder / "websites" / "notes_mock"
    vite = mock / "node_modules" / "vite" / "bin" / "vite.js"
    for path, text in ((vite, SERVER), (mock / "dist" / "index.html", PAGE)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name, files in bundles.items():
        place = folder / "cua_gym_tasks" / name
        place.mkdir(parents=True)
        for file, text in files.items():
            (place / file).write_text(text, encoding="utf-8")
    return folder
