"""A small site for the tests of this folder: pages that do what breaks harnesses, served on this machine."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

HOME = """<!doctype html><title>home</title>
<style>body { margin: 4px; font: 13px sans-serif } #from, #to { width: 80px; height: 30px; background: #ddd }</style>
<input id="field"><textarea id="area"></textarea>
<select id="list"><option>one<option>two<option>three</select>
<input id="date" type="date"><input id="file" type="file"><br>
<button id="ask" onclick="document.title = confirm('sure?')">ask</button>
<button id="tell" onclick="alert('done'); document.title = 'told'">tell</button>
<button id="name" onclick="document.title = prompt('name?', 'Ann')">name</button>
<button id="window" onclick="window.open('/second')">window</button>
<a id="tab" target="_blank" href="/second">tab</a> <a id="next" href="/second">next</a>
<a id="away" href="http://elsewhere.example/">away</a> <a id="save" href="/report.csv">save</a>
<button id="load" onclick="load()">load</button>
<div id="from" draggable="true">from</div><div id="to">to</div>
<div id="spin" style="animation: turn 1s infinite; width: 9px">|</div>
<div style="height: 2000px"></div>
<style>@keyframes turn { to { transform: rotate(360deg) } }</style>
<script>
  const $ = (id) => document.getElementById(id);
  $("from").ondragstart = (event) => event.dataTransfer.setData("text/plain", "card");
  $("to").ondragover = (event) => event.preventDefault();
  $("to").ondrop = (event) => {
    event.preventDefault();
    $("to").textContent = event.dataTransfer.getData("text/plain");
  };
  const load = async () => {
    await fetch("/slow");
    document.title = `loaded ${Math.round(performance.now())}`;
  };
</script>"""

SECOND = """<!doctype html><title>second</title><button id="close" onclick="window.close()">close</button>
<script>const frames = () => { requestAnimationFrame(frames); window.count = (window.count ?? 0) + 1; };
frames();</script>"""


FRAMING = """<!doctype html><body style="margin: 0"><iframe src="ADDRESS" width="200" height="200"></iframe>
<script>addEventListener("message", ({ data }) => { window.report = data; });</script>"""

REPORTING = """<!doctype html><script>
  const report = { random: Math.random(), year: new Date().getFullYear(), clicks: 0 };
  const send = () => parent.postMessage(report, "*");
  addEventListener("click", () => { report.clicks += 1; send(); });
  setTimeout(send, 200);
</script>"""


class Site:
    """A server with the pages; it notes the paths of its requests and has answers that wait."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.slow_s = 0.0  # how long /slow takes
        self.open = threading.Event()  # set to end the requests that stay open
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                site.answer(self)

            def log_message(self, *_: object) -> None:
                """Write nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_port}"
        self.address = f"http://{self.host}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        parts = urlsplit(handler.path)
        self.paths.append(parts.path)
        headers = {"Content-Type": "text/html; charset=utf-8"}
        status, body = 200, ""
        match parts.path:
            case "/":
                body = HOME
            case "/second":
                body = SECOND
            case "/framing":
                body = FRAMING.replace("ADDRESS", parse_qs(parts.query)["to"][0])
            case "/reporting":
                body = REPORTING
            case "/slow":
                self.open.wait(self.slow_s)
            case "/never":
                self.open.wait()
            case "/broken":
                status = 500
            case "/report.csv":
                body = "a,b\n1,2\n"
                headers["Content-Disposition"] = "attachment"
            case "/redirect":
                status = 302
                headers["Location"] = parse_qs(parts.query)["to"][0]
            case "/events":
                handler.send_response(200)
                handler.send_header("Content-Type", "text/event-stream")
                handler.end_headers()
                handler.wfile.write(b"data: hello\n\n")
                handler.wfile.flush()
                self.open.wait()
                handler.close_connection = True
                return
            case "/socket":
                self._echo(handler)
                return
            case "/worker.js":
                headers["Content-Type"] = "text/javascript"
                body = "self.addEventListener('fetch', () => {});"
            case _:
                status = 404
        content = body.encode()
        handler.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)

    def _echo(self, handler: BaseHTTPRequestHandler) -> None:
        """Send each message of a WebSocket back (RFC 6455); messages are shorter than 126 bytes."""
        key = handler.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        handler.send_response(101)
        for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade")):
            handler.send_header(name, value)
        handler.send_header("Sec-WebSocket-Accept", accept)
        handler.end_headers()
        handler.wfile.flush()
        handler.close_connection = True
        while (head := handler.rfile.read(2)) and head[0] & 15 == 1:
            mask, message = handler.rfile.read(4), handler.rfile.read(head[1] & 127)
            plain = bytes(byte ^ mask[at % 4] for at, byte in enumerate(message))
            handler.wfile.write(bytes([0x81, len(plain)]) + plain)
            handler.wfile.flush()

    def close(self) -> None:
        """End the server and what waits in it."""
        self.open.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving() -> Iterator[Site]:
    """Yield a site, and end it."""
    site = Site()
    try:
        yield site
    finally:
        site.close()
