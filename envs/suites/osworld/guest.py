"""A client of OSWorld's guest server, over HTTP, with a deadline on each call.

    Address            the host and the ports of a guest
    Executed           the result of a command in the guest
    Guest              one guest: take screenshots, execute commands, read and write files, set up
    RefusalError       the server answered with an error
    UnreachableError   there is no server at the address
    DisplayFullError   the guest's X display takes no more clients

The routes are defined in desktop_env/server/main.py of OSWorld. A guest is not trusted: redirects are not
followed, answers are bounded, and an answer of another form raises EnvError.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from bus.errors import EnvError, MissingPartError, TaskError, first_line

if TYPE_CHECKING:
    import urllib3

INSTALL = "pip install -e '.[osworld]' in dart's folder"

SERVER_PORT, CHROMIUM_PORT, VLC_PORT, VNC_PORT = 5000, 9222, 8080, 8006
"""Ports inside a guest."""

PYTHON = "python"  # command of the guest's Python, as in OSWorld

MAX_ANSWER_MB = 512
PROBE_DEADLINE_S = 10.0
POLL_S = 0.5
_BLOCK = 1 << 16

_OPEN_DISPLAY = "from Xlib import display; display.Display()"
_DISPLAY_FULL = "Maximum number of clients"  # an X server's answer if it has too many clients


@dataclass(frozen=True)
class Address:
    """The address of a guest. Evaluators that query applications use the last two ports."""

    host: str
    server_port: int = SERVER_PORT
    chromium_port: int = CHROMIUM_PORT
    vlc_port: int = VLC_PORT

    @property
    def url(self) -> str:
        """The URL of the guest's server."""
        return f"http://{self.host}:{self.server_port}"


@dataclass(frozen=True)
class Executed:
    """The output and the exit code of a command in the guest."""

    output: str
    error: str
    returncode: int


class RefusalError(EnvError):
    """The guest's server answered with an error: it is reachable, but this request failed."""


class UnreachableError(EnvError):
    """There is no server at the guest's address: connection refused, no such host, or no route."""


class DisplayFullError(EnvError):
    """The guest's X display takes no more clients; only a restart of the guest helps."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where}: its X display takes no more clients. OSWorld's server leaves a connection open "
            "for each screenshot: restart the guest's server (a container is replaced at the next "
            "reset; env.options.restart names a command that does it), and start its display with "
            "-maxclients 2048, which lasts some 2000 screenshots"
        )


def read_address(url: str) -> Address:
    """Return the address in `http://HOST:PORT?chromium_port=...&vlc_port=...`; the query is optional.

    Raises TaskError.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        ports = {name: int(value) for name, value in query}
    except ValueError:
        parts, port, ports = urlsplit(""), None, {}
    has_names = ports.keys() <= {"chromium_port", "vlc_port"}
    is_valid = has_names and all(0 < number < 1 << 16 for number in ports.values())
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or not is_valid:
        raise TaskError(
            "a guest's url is http://HOST:PORT, or http://HOST:PORT?chromium_port=9222&vlc_port=8080 "
            f"for other ports of its browser and VLC, got {url!r}"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Address(host, port or SERVER_PORT, **ports)


class Guest:
    """A guest. Not thread-safe. All methods raise EnvError on failure.

    `deadline_s` bounds each call, except calls that usually take long and have another deadline.
    """

    def __init__(self, address: Address, *, deadline_s: float = 30.0) -> None:
        self.address = address
        self._deadline_s = deadline_s
        self._http = import_urllib3().PoolManager(retries=False)

    # --- the screen ---

    def screenshot(self, *, deadline_s: float | None = None) -> bytes:
        """Return the screen as PNG, with the pointer. Raises DisplayFullError if X refuses more clients."""
        status, body = self._send("GET", "/screenshot", deadline_s=deadline_s)
        if status == 500:
            self._check_display()
        image = self._body_if_ok("/screenshot", status, body)
        if not image.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")):
            raise EnvError(f"{self._where('/screenshot')} is not an image: {_excerpt(image)}")
        return image

    def screen_size(self) -> tuple[int, int]:
        """Return (width, height) of the screen, in pixels."""
        return _size(self._json("POST", "/screen_size"), self._where("/screen_size"))

    def window_size(self, class_name: str) -> tuple[int, int]:
        """Return (width, height) of the window of an application, in pixels."""
        answer = self._json("POST", "/window_size", fields={"app_class_name": class_name})
        return _size(answer, self._where("/window_size"))

    def cursor_position(self) -> tuple[int, int]:
        """Return (x, y) of the pointer, in pixels."""
        answer = self._json("GET", "/cursor_position")
        if not isinstance(answer, list) or [type(value) for value in answer] != [int, int]:
            raise EnvError(f"{self._where('/cursor_position')} answers {answer!r}")
        return answer[0], answer[1]

    def accessibility(self, *, deadline_s: float = 60.0) -> str:
        """Return the accessibility tree of all applications, as XML."""
        answer = self._json("GET", "/accessibility", deadline_s=deadline_s)
        return _text_of(answer, "AT", self._where("/accessibility"))

    def terminal(self) -> str:
        """Return the terminal window's text; empty if there is none."""
        answer = self._json("GET", "/terminal")
        return str(answer.get("output") or "") if isinstance(answer, dict) else ""

    # --- commands and files ---

    def execute(
        self,
        command: str | Sequence[str],
        *,
        shell: bool = False,
        deadline_s: float | None = None,
        route: str = "/execute",
    ) -> Executed:
        """Run a command in the guest to its end. A list does not pass through a shell unless `shell` is set.

        The server expands a leading `~/` in each argument, and gives up after 120 s.
        """
        command = command if isinstance(command, str) else list(command)
        answer = self._json(
            "POST", route, body={"command": command, "shell": shell}, deadline_s=deadline_s
        )
        if not isinstance(answer, dict) or not isinstance(answer.get("returncode"), int):
            raise EnvError(f"{self._where(route)} answers {answer!r}")
        output, error = answer.get("output"), answer.get("error")
        return Executed(str(output or ""), str(error or ""), answer["returncode"])

    def read_file(self, path: str) -> bytes | None:
        """Return a file's bytes, None if there is no such file."""
        status, body = self._send("POST", "/file", fields={"file_path": path})
        if status == 404:
            return None
        return self._body_if_ok("/file", status, body)

    def has_file(self, path: str) -> bool:
        """Return True if the server can read a file at `path`, without a transfer of its contents.

        For a folder, or a file without permission to read, the server answers 500.
        """
        until, seconds = self._until(None)
        with self._request("POST", "/file", seconds, _form(path)) as response:
            status = response.status
            body = b"" if status == 200 else self._read(response, "/file", until, seconds)
            response.close()  # the rest of the file stays unread
        if status in (404, 500):
            return False
        self._body_if_ok("/file", status, body)
        return True

    def upload(self, path: str, data: bytes, *, deadline_s: float = 600.0) -> None:
        """Write a file in the guest, and the folders above it."""
        name = path.replace("\\", "/").rpartition("/")[2] or "file"
        fields = {"file_path": path, "file_data": (name, data)}
        status, body = self._send(
            "POST", "/setup/upload", fields=fields, multipart=True, deadline_s=deadline_s
        )
        self._body_if_ok("/setup/upload", status, body)

    def list_directory(self, path: str) -> dict[str, Any]:
        """Return a folder's tree, with the keys `type`, `name` and `children`."""
        answer = self._json("POST", "/list_directory", body={"path": path})
        if not isinstance(answer, dict) or not isinstance(answer.get("directory_tree"), dict):
            raise EnvError(f"{self._where('/list_directory')} answers {answer!r}")
        return dict(answer["directory_tree"])

    def platform(self) -> str:
        """Return `Linux`, `Windows` or `Darwin`."""
        return self._ask("GET", "/platform").decode("utf-8", "replace").strip()

    def prepare(
        self, step: str, parameters: Mapping[str, Any], *, deadline_s: float | None = None
    ) -> None:
        """Perform one of the server's set-up steps: `launch`, `open_file`, `activate_window`, ..."""
        self._ask("POST", f"/setup/{step}", body=dict(parameters), deadline_s=deadline_s)

    # --- start and end ---

    def wait_ready(self, deadline_s: float, *, restarting: bool = False) -> None:
        """Wait until the guest shows its screen. Raises EnvError after `deadline_s`.

        Unless the guest is `restarting`, this raises at once if there is no server at the address or the
        display takes no more clients.
        """
        until, last = time.monotonic() + deadline_s, "not tried"
        while (left_s := until - time.monotonic()) > 0:
            try:
                self.screenshot(deadline_s=min(PROBE_DEADLINE_S, left_s))
            except (UnreachableError, DisplayFullError) as error:
                if not restarting:
                    raise
                last = str(error)
            except EnvError as error:
                last = str(error)
            else:
                return
            time.sleep(min(POLL_S, max(0.0, until - time.monotonic())))
        raise EnvError(f"no screenshot in {deadline_s:g} s: {last}")

    def close(self) -> None:
        """Close the connections."""
        self._http.clear()

    def raise_if_full(self, error: str) -> None:
        """Raise DisplayFullError if `error`, the output of a program in the guest, contains that message."""
        if _DISPLAY_FULL in error:
            raise DisplayFullError(f"guest {self.address.url}")

    def _check_display(self) -> None:
        """Raise DisplayFullError if programs of the guest cannot open its display any more."""
        try:
            result = self.execute([PYTHON, "-c", _OPEN_DISPLAY], deadline_s=PROBE_DEADLINE_S)
        except EnvError:
            return  # the caller's error has more information
        self.raise_if_full(result.error)

    # --- one call ---

    def _json(self, method: str, route: str, **more: Any) -> Any:
        """Send a request and return the JSON value of the answer."""
        body = self._ask(method, route, **more)
        try:
            return json.loads(body)
        except ValueError:
            raise EnvError(f"{self._where(route)} is not JSON: {_excerpt(body)}") from None

    def _ask(self, method: str, route: str, **more: Any) -> bytes:
        """Send a request and return the answer."""
        return self._body_if_ok(route, *self._send(method, route, **more))

    def _body_if_ok(self, route: str, status: int, body: bytes) -> bytes:
        """Return the answer. Raises RefusalError for a status other than 200."""
        if status != 200:
            raise RefusalError(f"{self._where(route)} answers {status}: {_excerpt(body)}")
        return body

    def _where(self, route: str) -> str:
        return f"guest {self.address.url}{route}"

    def _send(
        self,
        method: str,
        route: str,
        *,
        body: Mapping[str, Any] | None = None,
        fields: Mapping[str, Any] | None = None,
        multipart: bool = False,
        deadline_s: float | None = None,
    ) -> tuple[int, bytes]:
        """Return (status, answer). `body` is sent as JSON, `fields` as a form."""
        content: dict[str, Any] = {"json": body} if body is not None else {}
        if fields is not None:
            content = {"fields": fields, "encode_multipart": multipart}
        until, seconds = self._until(deadline_s)
        with self._request(method, route, seconds, content) as response:
            return response.status, self._read(response, route, until, seconds)

    def _until(self, deadline_s: float | None) -> tuple[float, float]:
        """Return (time.monotonic() at which a call that begins now must end, its seconds)."""
        seconds = self._deadline_s if deadline_s is None else deadline_s
        return time.monotonic() + seconds, seconds

    @contextmanager
    def _request(
        self, method: str, route: str, seconds: float, content: Mapping[str, Any]
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Yield the answer before its body is read; any error of the connection becomes an EnvError."""
        urllib3 = import_urllib3()
        try:
            response = self._http.request(
                method,
                self.address.url + route,
                timeout=seconds,
                redirect=False,
                preload_content=False,
                **content,
            )
            try:
                yield response
            finally:
                response.release_conn()
        # This error comes first, since it is a subclass of urllib3's TimeoutError.
        except urllib3.exceptions.NewConnectionError as error:
            why = error.__cause__ or error
            raise UnreachableError(
                f"{self._where(route)}: no server answers there ({first_line(why)}); start the guest's "
                "server, or correct env.options.url"
            ) from error
        except urllib3.exceptions.TimeoutError as error:
            raise EnvError(f"{self._where(route)}: no answer in {seconds:g} s") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise EnvError(f"{self._where(route)}: {type(error).__name__}: {error}") from error

    def _read(
        self, response: urllib3.BaseHTTPResponse, route: str, until: float, seconds: float
    ) -> bytes:
        """Return the answer, read in pieces so that a slow one cannot exceed the deadline."""
        blocks, size = [], 0
        while block := response.read1(_BLOCK):
            blocks.append(block)
            size += len(block)
            if size > MAX_ANSWER_MB << 20:
                response.close()
                raise EnvError(f"{self._where(route)} answers more than {MAX_ANSWER_MB} MiB")
            if time.monotonic() > until:
                response.close()
                raise EnvError(f"{self._where(route)}: no whole answer in {seconds:g} s")
        return b"".join(blocks)


def import_urllib3() -> ModuleType:
    """Return the package urllib3. Raises MissingPartError with the install step."""
    try:
        import urllib3
    except ImportError:
        raise MissingPartError(f"guests need the package urllib3: {INSTALL}") from None
    return urllib3


def _form(path: str) -> dict[str, Any]:
    return {"fields": {"file_path": path}, "encode_multipart": False}


def _size(answer: object, where: str) -> tuple[int, int]:
    if isinstance(answer, dict):
        width, height = answer.get("width"), answer.get("height")
        if isinstance(width, int) and isinstance(height, int):
            return width, height
    raise EnvError(f"{where} answers {answer!r}")


def _text_of(answer: object, key: str, where: str) -> str:
    if isinstance(answer, dict) and isinstance(answer.get(key), str):
        return str(answer[key])
    raise EnvError(f"{where} answers {answer!r}")


def _excerpt(body: bytes) -> str:
    text = body[:200].decode("utf-8", "replace")
    return " ".join(text.split()) or "nothing"
