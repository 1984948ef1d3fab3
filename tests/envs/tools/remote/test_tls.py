"""Certificates are checked: one of an authority that is named is taken, any other refused.

localhost.pem is a key and a certificate that signs itself, for these tests alone, made by
`openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500 -subj /CN=localhost
-addext subjectAltName=DNS:localhost,IP:127.0.0.1`.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from websockets.sync.server import serve

from bus.errors import EnvError
from dart_cuabench.http import JsonClient
from envs.suites.openenv.session import Session
from envs.tools.remote.servers import Access, Address

CERTIFICATE = str(Path(__file__).with_name("localhost.pem"))
TRUSTED = Access(token="hush", ca_file=CERTIFICATE)


class Health(BaseHTTPRequestHandler):
    """Answers with the token that came."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"token": self.headers["Authorization"]}).encode())

    def log_message(self, *_: object) -> None:
        pass


def of_server() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context


@contextmanager
def running(server) -> Iterator[Address]:
    """The address of a server while it serves in a thread."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Address("127.0.0.1", server.socket.getsockname()[1], secure=True)
    finally:
        server.shutdown()
        thread.join()


def test_an_https_server_is_believed_by_its_certificate_alone():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Health)
    server.socket = of_server().wrap_socket(server.socket, server_side=True)
    with server, running(server) as address:
        client = JsonClient(address, TRUSTED, what="worker", reply_mb=1)
        assert client.call("GET", "/health", deadline_s=30) == {"token": "Bearer hush"}
        client.close()
        with pytest.raises(EnvError, match=r"TLS failed.*certificate"):
            JsonClient(address, Access(), what="worker", reply_mb=1).call(
                "GET", "/health", deadline_s=30
            )


def test_a_websocket_over_tls_is_believed_by_its_certificate_alone():
    def answer(connection):
        connection.recv()
        token = connection.request.headers["Authorization"]
        reply = {"observation": {"token": token}, "reward": None, "done": False}
        connection.send(json.dumps({"type": "observation", "data": reply}))

    more = {"connect_s": 30.0, "reply_mb": 1, "numbers": None}
    with serve(answer, "127.0.0.1", 0, ssl=of_server()) as server, running(server) as address:
        session = Session(address, TRUSTED, **more)
        assert session.request("reset", {}, 30).observation == {"token": "Bearer hush"}
        session.close()
        with pytest.raises(EnvError, match=r"TLS failed.*certificate"):
            Session(address, Access(), **more)
