"""A guest server for tests: OSWorld's routes on a plain X display, nothing else.

    python guest_server.py DISPLAY HOME [leaks] [--port PORT]

Serves on a free port of 127.0.0.1, which it prints. The routes, forms and answers are those of
OSWorld's desktop_env/server/main.py, as its own client (PyPI desktop-env, controllers/) uses them;
that package does not ship the server. Commands run as they do there: an argument list without a
shell, a leading `~/` expanded, 120 s at most.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from PIL import ImageGrab

LAUNCHED: list[subprocess.Popen[bytes]] = []
LEAKED: list[object] = []


class Routes(BaseHTTPRequestHandler):
    """One request each."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/screenshot":
            image = io.BytesIO()
            try:
                if "leaks" in sys.argv:
                    leak()
                ImageGrab.grab(xdisplay=os.environ["DISPLAY"]).save(image, "PNG", compress_level=1)
            except Exception:  # noqa: BLE001 - as in Flask
                self.answer(500, b"<h1>Internal Server Error</h1>", "text/html")
            else:
                self.answer(200, image.getvalue(), "image/png")
        elif self.path == "/platform":
            self.answer(200, b"Linux", "text/html")
        elif self.path == "/terminal":
            told = Path.home() / "terminal.txt"  # what the terminal shows; there is none without it
            output = told.read_text() if told.exists() else None
            self.tell(200, {"output": output, "status": "success"})
        elif self.path == "/accessibility":
            tree = Path.home() / "tree.xml"
            self.tell(200, {"AT": tree.read_text() if tree.exists() else "<desktop-frame/>"})
        elif self.path == "/cursor_position":
            self.tell(200, list(pointer()))
        else:
            self.answer(404, b"Not Found", "text/html")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = self.headers.get("Content-Type", "")
        told = json.loads(body) if kind.startswith("application/json") else {}
        if self.path == "/screen_size":
            image = ImageGrab.grab(xdisplay=os.environ["DISPLAY"])
            self.tell(200, {"width": image.width, "height": image.height})
        elif self.path in ("/execute", "/setup/execute"):
            self.execute(told)
        elif self.path == "/setup/launch":
            try:
                LAUNCHED.append(subprocess.Popen(told["command"], shell=told["shell"]))
                self.answer(200, b"launched successfully", "text/html")
            except OSError as error:
                self.tell(500, {"status": "error", "message": str(error)})
        elif self.path == "/file":
            fields = form(kind, body)
            self.file(expanded(fields["file_path"].decode()))
        elif self.path == "/setup/upload":
            fields = form(kind, body)
            path = Path(expanded(fields["file_path"].decode()))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(fields["file_data"])
            self.answer(200, b"File Uploaded", "text/html")
        elif self.path == "/list_directory":
            folder = Path(told["path"])
            children = [{"type": "file", "name": each.name} for each in sorted(folder.iterdir())]
            tree = {"type": "directory", "name": folder.name, "children": children}
            self.tell(200, {"directory_tree": tree})
        elif self.path == "/setup/activate_window":
            self.answer(404, f"Window {told['window_name']} not found.".encode(), "text/html")
        else:
            self.answer(404, b"Not Found", "text/html")

    def execute(self, told: dict[str, Any]) -> None:
        command, shell = told["command"], told.get("shell", False)
        if isinstance(command, str) and not shell:
            command = shlex.split(command)
        if not isinstance(command, str):
            command = [expanded(part) for part in command]
        try:
            done = subprocess.run(
                command, shell=shell, capture_output=True, text=True, timeout=120, check=False
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self.tell(500, {"status": "error", "message": str(error)})
            return
        answer = {"status": "success", "output": done.stdout, "error": done.stderr}
        self.tell(200, {**answer, "returncode": done.returncode})

    def file(self, path: str) -> None:
        if Path(path).is_file():
            self.answer(200, Path(path).read_bytes(), "application/octet-stream")
        else:
            self.tell(404, {"error": "File not found"})

    def tell(self, status: int, value: object) -> None:
        self.answer(status, json.dumps(value).encode(), "application/json")

    def answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def expanded(part: str) -> str:
    return str(Path(part).expanduser()) if part.startswith("~/") else part


def form(kind: str, body: bytes) -> dict[str, bytes]:
    """The fields of a form, of either encoding."""
    if kind.startswith("application/x-www-form-urlencoded"):
        return {key: values[0].encode() for key, values in parse_qs(body.decode()).items()}
    head = f"Content-Type: {kind}\r\n\r\n".encode()
    parts = BytesParser(policy=HTTP).parsebytes(head + body).iter_parts()  # type: ignore[attr-defined]
    return {
        part.get_param("name", header="content-disposition"): part.get_payload(decode=True)
        for part in parts
    }


def leak() -> None:
    """Open connections to the display and keep them: ten for the one of OSWorld's pyxcursor.py."""
    from Xlib import display

    LEAKED.extend(display.Display() for _ in range(10))


def pointer() -> tuple[int, int]:
    """Where the pointer is."""
    from Xlib import display

    found = display.Display().screen().root.query_pointer()
    return found.root_x, found.root_y


if __name__ == "__main__":
    os.environ.update(DISPLAY=sys.argv[1], HOME=sys.argv[2])
    # As in OSWorld's image, `python` is one that has Xlib.
    commands = Path(sys.argv[2], "bin")
    commands.mkdir(exist_ok=True)
    (commands / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (commands / "python").chmod(0o755)
    os.environ["PATH"] = f"{commands}:{os.environ['PATH']}"
    port = int(sys.argv[sys.argv.index("--port") + 1]) if "--port" in sys.argv else 0
    server = ThreadingHTTPServer(("127.0.0.1", port), Routes)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    try:
        server.serve_forever()
    finally:
        for launched in LAUNCHED:
            launched.kill()
