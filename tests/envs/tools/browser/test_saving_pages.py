"""Promises about pages that save at every stroke, and about those that move what is dragged in their frames.

The real browser plays; where it is not installed, these tests are skipped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bus.errors import MissingPartError
from envs.contract.actions import Click, Drag, Type
from envs.tools.browser.gui import BrowserGui, GuiOptions
from envs.tools.browser.process import find_chromium

try:
    find_chromium()
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

PAGE = b"""<!doctype html><body style="margin:0">
<textarea id="text" style="position:absolute;left:0;top:0;width:200px;height:40px"></textarea>
<div id="card" style="position:absolute;left:0;top:60px;width:40px;height:40px;background:red"></div>
<script>
  text.oninput = () => { fetch("/save", {method: "POST", body: text.value}); };
  let at = null, left = 0;
  card.onmousedown = (event) => { at = event.clientX; };
  addEventListener("mousemove", (event) => { if (at !== null) requestAnimationFrame(() => { left = event.clientX - 20; }); });
  addEventListener("mouseup", () => { if (at !== null) { at = null; card.style.left = left + "px"; } });
</script></body>"""


class SlowFirst(ThreadingHTTPServer):
    """A server that takes long over short texts, so that requests at the same time end in another order."""

    text = ""
    requests = 0


class Handler(BaseHTTPRequestHandler):
    """Serves the page, and keeps the text that was saved last."""

    protocol_version = "HTTP/1.1"
    server: SlowFirst

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def do_GET(self) -> None:
        self._answer(PAGE)

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        time.sleep(0.3 / len(text))
        self.server.text = text
        self.server.requests += 1
        self._answer(b"saved" * 10_000)  # which the page does not read

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[SlowFirst]:
    server = SlowFirst(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def gui(server: SlowFirst) -> Iterator[BrowserGui]:
    gui = BrowserGui(find_chromium, ["127.0.0.1"], GuiOptions(size=(420, 320), deadline_s=60.0))
    host = f"127.0.0.1:{server.server_port}"
    gui.begin([host])
    gui.open(f"http://{host}/")
    yield gui
    gui.close()


def test_what_is_saved_at_every_stroke_is_the_whole_text_in_the_end(
    gui: BrowserGui, server: SlowFirst
) -> None:
    gui.perform(Click(x=100, y=20))
    gui.perform(Type(text="in order"))
    assert gui.ask("text.value") == "in order"
    assert server.requests == len("in order")
    assert server.text == "in order"


def test_a_drag_takes_the_frames_in_which_a_page_follows_it(gui: BrowserGui) -> None:
    gui.perform(Drag(path=[(20, 80), (220, 80)]))
    assert gui.ask("card.style.left") == "200px"
