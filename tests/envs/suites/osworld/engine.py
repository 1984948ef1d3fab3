"""A container engine for tests: Docker's HTTP interface, the part that envs/suites/osworld/container.py uses.

It runs nothing: a started container's port 5000 is that of `guest_port`, a server of the test's. The
answers have the shapes of Docker Engine API 1.43.
"""

from __future__ import annotations

import json
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class Engine:
    """One engine. `containers` are those that exist; `log` holds its requests in order."""

    def __init__(self) -> None:
        self.containers: dict[str, dict[str, Any]] = {}
        self.images = {"happysixd/osworld-docker"}
        self.log: list[str] = []
        self.made = 0
        self.guest_port = 0
        self.refuses = ""  # a request, as in `log`
        self.dies = ""  # a container's last output, if it exits at once
        self.fails_to_start = False
        self.fails_every = 0  # of so many starts one fails, after its ports were taken
        self.starts = 0
        self.host_ports = set(range(40000, 60000))  # free ones
        self._lock = threading.Lock()
        self.fails_to_remove = False
        engine = self

        class Routes(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, answer = engine.answer(self.command, self.path, body)
                raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                kind = "text/plain" if isinstance(answer, bytes) else "application/json"
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST = do_DELETE = serve  # noqa: N815 - http.server's names

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
        self.server.daemon_threads = True
        self.url = f"tcp://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def end(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, name: str, config: dict[str, Any]) -> str:
        """A container that is created, by this or by another client."""
        self.made += 1
        container = f"{self.made:064x}"
        self.containers[container] = {"Name": name, "Config": config, "Status": "created"}
        return container

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        parts = urlsplit(path)
        asked = {key: values[0] for key, values in parse_qs(parts.query).items()}
        words = [word for word in parts.path.split("/") if word]
        if words and words[0].startswith("v1."):
            words = words[1:]
        self.log.append(f"{method} {'/'.join(words)}")
        if self.log[-1] == self.refuses:
            return 500, {"message": "the engine is out of order"}
        match method, words:
            case "GET", ["version"]:
                return 200, {"ApiVersion": "1.43", "MinAPIVersion": "1.24", "Version": "24.0"}
            case "GET", ["_ping"]:
                return 200, b"OK"
            case "GET", ["images", *name, "json"]:
                if "/".join(name) in self.images:
                    return 200, {"Id": "sha256:1", "RepoTags": []}
                return 404, {"message": "No such image"}
            case "POST", ["containers", "create"]:
                return 201, {"Id": self.add(asked.get("name", ""), json.loads(body))}
            case "GET", ["containers", "json"]:
                (label,) = json.loads(asked["filters"])["label"]
                return 200, [
                    {
                        "Id": each,
                        "Names": [f"/{made['Name']}"],
                        "Labels": made["Config"]["Labels"],
                        "State": made["Status"],
                    }
                    for each, made in list(self.containers.items())
                    if label in made["Config"].get("Labels", {})
                ]
            case _, ["containers", container, *rest]:
                if container not in self.containers:
                    return 404, {"message": f"No such container: {container}"}
                return self.of_container(method, container, rest)
        return 404, {"message": "page not found"}

    def of_container(self, method: str, container: str, rest: list[str]) -> tuple[int, Any]:
        made = self.containers[container]
        match method, rest:
            case "POST", ["start"]:
                with self._lock:
                    self.starts += 1
                    fails = self.fails_every and self.starts % self.fails_every == 0
                    wanted = len(made["Config"].get("HostConfig", {}).get("PortBindings", {}))
                    if wanted > len(self.host_ports):
                        return 500, {"message": "all ports are allocated"}
                    made["HostPorts"] = [self.host_ports.pop() for _ in range(wanted)]
                if self.fails_to_start or fails:
                    return 500, {"message": "driver failed programming external connectivity"}
                made["Status"] = "exited" if self.dies else "running"
                return 204, b""
            case "GET", ["json"]:
                return 200, self.inspected(container)
            case "GET", ["logs"]:
                line = self.dies.encode()
                return 200, struct.pack(">BxxxL", 1, len(line)) + line
            case "DELETE", [] if self.fails_to_remove:
                return 500, {"message": "removal of container is stuck"}
            case "DELETE", []:
                with self._lock:
                    self.containers.pop(container, None)
                    self.host_ports.update(made.get("HostPorts", []))
                return 204, b""
        return 404, {"message": "page not found"}

    def inspected(self, container: str) -> dict[str, Any]:
        made = self.containers[container]
        config = made["Config"]
        running = made["Status"] == "running"  # only then are ports published
        bound = config.get("HostConfig", {}).get("PortBindings", {}) if running else {}
        ports = {
            port: [{"HostIp": wanted[0]["HostIp"], "HostPort": str(self.guest_port)}]
            for port, wanted in bound.items()
        }
        return {
            "Id": container,
            "Name": f"/{made['Name']}",
            "State": {"Status": made["Status"]},
            "Config": {"Labels": config.get("Labels", {}), "Tty": False},
            "HostConfig": {"LogConfig": {"Type": "json-file"}},
            "NetworkSettings": {"Ports": ports},
        }
