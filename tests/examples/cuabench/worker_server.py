"""A worker of cua-bench for tests: the routes of cua_bench/workers/worker_server.py, with screens of our own.

    python worker_server.py [PORT]

Serves on 127.0.0.1 and prints its port. As there: /reset ends all episodes, one episode has at most one
evaluation, at DoneAction, an evaluator that raises gives 0.0, and errors are {"detail": ...}. A task shows a
square; it is done once the square is clicked and not the text typed. What stands behind env_path `faults/`
breaks in the way that it says; `screens/1280x720` has a screen of that size.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any

from PIL import Image, ImageDraw

MAX_ENVS = 2
SIZE = (64, 48)
LOCK = threading.Lock()
ENVS: dict[int, Episode] = {}
SEEN: list[dict[str, Any]] = []  # every action and reset, for /seen


class Episode:
    """A screen with a square."""

    def __init__(self, env_path: str, task_index: int) -> None:
        self.fault = env_path.removeprefix("faults/") if env_path.startswith("faults/") else ""
        size = env_path.removeprefix("screens/").split("x")
        self.size = (int(size[0]), int(size[1])) if env_path.startswith("screens/") else SIZE
        rng = Random(task_index)
        self.at = (rng.randrange(4, self.size[0] - 16), rng.randrange(4, self.size[1] - 16))
        self.clicked = 0.0

    def screenshot(self) -> str:
        image = Image.new("RGB", self.size, (240, 240, 240))
        fill = (0, 160, 0) if self.clicked else (200, 0, 0)
        ImageDraw.Draw(image).rectangle([*self.at, self.at[0] + 11, self.at[1] + 11], fill=fill)
        into = io.BytesIO()
        image.save(into, "PNG", compress_level=1)
        return base64.b64encode(into.getvalue()).decode()

    def perform(self, action: dict[str, Any]) -> None:
        if action["type"] not in KNOWN:
            raise ValueError(f"Unknown action type: {action['type']}")
        if action["type"] == "ClickAction":
            x, y = int(action["x"]) - self.at[0], int(action["y"]) - self.at[1]
            if 0 <= x < 12 and 0 <= y < 12:
                self.clicked = 1.0
        elif action["type"] == "TypeAction":
            self.clicked /= 2

    def evaluate(self) -> float:
        if self.fault == "reward":
            return 7.0
        return self.clicked


KNOWN = {
    f"{name}Action"
    for name in "Click RightClick DoubleClick MiddleClick Drag MoveTo Scroll Type Key Hotkey Wait Done".split()
}


class Routes(BaseHTTPRequestHandler):
    """One request each."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = (
        True  # as uvicorn: it waits for an acknowledgement that comes 40 ms late
    )

    def do_GET(self) -> None:
        if self.path == "/health":
            counts = {"available_envs": MAX_ENVS - len(ENVS), "active_envs": len(ENVS)}
            self.tell(200, {"status": "ok", **counts, "max_envs": MAX_ENVS})
        elif self.path == "/seen":
            self.tell(200, {"seen": SEEN})
        else:
            self.tell(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        SEEN.append({"path": self.path, "authorization": self.headers["Authorization"], **body})
        with LOCK:
            getattr(self, self.path.strip("/"), self.unknown)(body)

    def reset(self, body: dict[str, Any]) -> None:
        ENVS.clear()
        if body["env_path"] == "faults/full":
            self.tell(503, {"detail": f"No available environments. Max capacity: {MAX_ENVS}"})
            return
        if body["env_path"] == "faults/reset":
            self.tell(500, {"detail": "create_sandbox was never called"})
            return
        if body["env_path"] == "faults/redirect":
            self.send_response(307)
            self.send_header("Location", "http://127.0.0.1:1/reset")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        ENVS[0] = Episode(body["env_path"], body["task_index"])
        screenshot = ENVS[0].screenshot()
        if ENVS[0].fault == "image":
            screenshot = base64.b64encode(b"no image").decode()
        if ENVS[0].fault == "big":
            screenshot = "A" * (3 << 20)
        self.tell(200, {"screenshot": screenshot, "instruction": "Click the square.", "env_id": 0})

    def step(self, body: dict[str, Any]) -> None:
        if body["env_id"] not in ENVS:
            self.tell(404, {"detail": f"Environment {body['env_id']} not found"})
            return
        episode = ENVS[body["env_id"]]
        if episode.fault == "hang":
            threading.Event().wait(60)
        if episode.fault == "exit":
            os._exit(3)
        try:
            episode.perform(body["action"])
        except (ValueError, KeyError) as error:
            self.tell(500, {"detail": str(error)})
            return
        is_done, reward = body["action"]["type"] == "DoneAction", 0.0
        if is_done:
            reward = episode.evaluate()
            del ENVS[body["env_id"]]
        self.tell(200, {"screenshot": episode.screenshot(), "reward": reward, "done": is_done})

    def shutdown(self, body: dict[str, Any]) -> None:
        ENVS.pop(body.get("env_id") or 0, None)
        self.tell(200, {"status": "ok", "message": "shut down"})

    def unknown(self, _body: dict[str, Any]) -> None:
        self.tell(404, {"detail": "Not Found"})

    def tell(self, status: int, answer: dict[str, Any]) -> None:
        sent = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if sys.argv[1:] else 0), Routes)
    server.daemon_threads = True
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
