"""A connection that a server closed meanwhile is opened anew, and a request is never sent twice."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from bus.errors import EnvError
from dart_cuabench.http import JsonClient, RefusedError
from envs.tools.remote.servers import Access, Address
from tests.waiting import PATIENCE_S

OK = b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"is": 1}'


class Server:
    """Answers each connection's request with the next of `answers`, and closes it."""

    def __init__(self, answers: list[bytes]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(10)
        self._answers = answers
        self.requests: list[bytes] = []
        self.closed = threading.Semaphore(0)  # released for each connection that is over
        self.address = Address("127.0.0.1", self._listening.getsockname()[1])

    def serve(self) -> None:
        with suppress(TimeoutError):
            for answer in self._answers:
                connection, _ = self._listening.accept()
                with connection:
                    self.requests.append(_whole(connection))
                    connection.sendall(answer)
                self.closed.release()

    @contextmanager
    def running(self) -> Iterator[JsonClient]:
        thread = threading.Thread(target=self.serve)
        thread.start()
        client = JsonClient(self.address, Access(), what="worker", reply_mb=1)
        try:
            yield client
        finally:
            client.close()
            thread.join()
            self._listening.close()


def _whole(connection: socket.socket) -> bytes:
    """A request with its body: what is left unread when a socket closes resets the connection."""
    read = b""
    while True:
        read += connection.recv(65536)
        head, end, body = read.partition(b"\r\n\r\n")
        lengths = [
            int(line.partition(b":")[2])
            for line in head.splitlines()
            if line.lower().startswith(b"content-length:")
        ]
        if end and len(body) >= sum(lengths):
            return read


def test_a_connection_that_the_server_closed_is_opened_anew():
    server = Server([OK, OK])
    with server.running() as client:
        for _ in range(2):
            assert client.call("POST", "/step", {"a": 1}, deadline_s=30) == {"is": 1}
            assert server.closed.acquire(timeout=PATIENCE_S)
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "RemoteDisconnected"),
        (b"nonsense\r\n\r\n", "BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "no JSON object: {"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", r"no JSON object: \[\]"),
    ],
)
def test_a_request_whose_answer_is_none_is_not_sent_again(answer, why):
    server = Server([answer])
    with server.running() as client, pytest.raises(EnvError, match=f"/step.*{why}"):
        client.call("POST", "/step", {"a": 1}, deadline_s=30)
    assert len(server.requests) == 1


def test_an_error_of_the_server_says_what_it_says():
    body = b'{"detail": "no\\nroom"}'
    answer = b"HTTP/1.1 503 Full\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    refused = pytest.raises(RefusedError, match="answers 503: no room")
    with Server([answer]).running() as client, refused as error:
        client.call("GET", "/health", deadline_s=30)
    assert (error.value.status, error.value.detail) == (503, "no room")
