"""The addresses of a run's processes, their private directories and CURVE keys.

    Endpoints          name -> address: ipc:// below the run directory, tcp:// if configured
    make_private_dir   makes a directory that no other user can enter
    CurveKeys          the keys of one process; read_curve and write_key_pair read and write them
    check_secure       refuses an address that other hosts can reach without keys

Names: `data` and `train` (request/reply), `telemetry-in` and `telemetry-out` (publish and subscribe; the
data service's forwarder binds both), `rollout-<id>` (request/reply, one for each rollout worker).
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from bus.errors import ConfigError, DiskError, RunDirectoryError

DATA = "data"
TRAIN = "train"
TELEMETRY_IN = "telemetry-in"
TELEMETRY_OUT = "telemetry-out"

MAX_IPC_PATH_BYTES = 107
"""Longest path of a Unix socket; with its final zero it has 108 bytes (unix(7))."""

_LONGEST_NAME_BYTES = 24  # reserved for "<name>.ipc" in the length of a directory's path
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_Z85_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


def disk_full(error: OSError) -> bool:
    """Return True if the disk, or the quota of this user or process, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def make_private_dir(path: Path) -> Path:
    """Create the directory with mode 0700, or check that it is this user's and closed to others; return it.

    Raises RunDirectoryError with the path and the fix, DiskError if the disk is full.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        if disk_full(error):
            raise DiskError(
                f"{path}: cannot be created: {error.strerror}; free space and start again"
            ) from None
        raise RunDirectoryError(
            f"{path}: cannot be created: {error.strerror}; choose another"
        ) from None
    if not stat.S_ISDIR(status.st_mode):
        raise RunDirectoryError(f"{path}: not a directory (links are refused): choose another")
    if status.st_uid != os.getuid():
        raise RunDirectoryError(f"{path}: belongs to another user: choose another run directory")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise RunDirectoryError(
            f"{path}: other users can enter (mode {mode:04o}): chmod 700 {path}"
        )
    return path


@dataclass(frozen=True)
class Endpoints:
    """The addresses of one run; `overrides` is name -> tcp:// address, from the configuration."""

    run_dir: Path
    overrides: Mapping[str, str] = field(default_factory=dict)

    def address(self, name: str) -> str:
        """Return the address of `name`, and make the private directories of an ipc:// address.

        Raises RunDirectoryError if the run directory is not private, ConfigError if the name is invalid.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"endpoint name {name!r}: use lower-case letters, digits, '.', '_' and '-'"
            )
        if name in self.overrides:
            return self.overrides[name]
        path = self._socket_dir(f"{name}.ipc") / f"{name}.ipc"
        return f"ipc://{path}"

    def _socket_dir(self, file_name: str) -> Path:
        """Return RUN/sock, or a directory with a short path in /tmp if that path is too long.

        The latter depends only on the user and the run directory's real path, so that all processes of the
        run use the same one, whatever their environment variables are.
        """
        run_dir = Path(os.path.realpath(self.run_dir))
        make_private_dir(run_dir)
        sock = run_dir / "sock"
        name_bytes = max(_LONGEST_NAME_BYTES, len(file_name))
        if len(os.fsencode(sock)) + 1 + name_bytes <= MAX_IPC_PATH_BYTES:
            return make_private_dir(sock)
        digest = hashlib.blake2b(os.fsencode(run_dir), digest_size=8).hexdigest()
        mine = make_private_dir(Path("/tmp") / f"dart-{os.getuid()}")  # noqa: S108 - checked to be ours
        return make_private_dir(mine / digest)


# --- keys -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CurveKeys:
    """The CURVE keys of one process, each a Z85 text of 40 characters.

    A process that serves needs `allowed`, the public keys of its clients. A process that connects needs
    `server`, the public key of the server.
    """

    public: str
    secret: str = field(repr=False)
    server: str = ""
    allowed: frozenset[str] = frozenset()


def write_key_pair(path: Path) -> str:
    """Write a new key pair to the new file `path` (JSON, mode 0600), and return the public key.

    Raises ConfigError if the file exists or cannot be written.
    """
    import zmq  # here, since every command reads addresses, and few make keys

    public, secret = (key.decode("ascii") for key in zmq.curve_keypair())
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: cannot write keys: {error.strerror}") from None
    with os.fdopen(handle, "w", encoding="ascii") as file:
        json.dump({"public": public, "secret": secret}, file, indent=1)
    return public


def read_curve(path: Path, *, server: str = "", allowed: Path | None = None) -> CurveKeys:
    """Return the keys of this process from its key file.

    `server` is the public key of the other side. `allowed` is a file of lines "KEY any comment"; a line
    that begins with the word "#" is a comment. Raises ConfigError with the file and the fix.
    """
    try:
        status = path.stat()
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read keys: {error}") from None
    lines = _allowed_lines(allowed) if allowed else []
    if status.st_mode & 0o077:
        raise ConfigError(f"{path}: other users can read the secret key: chmod 600 {path}")
    if not isinstance(value, dict) or value.keys() != {"public", "secret"}:
        raise ConfigError(f"{path}: want a JSON object of public and secret")
    keys = {words[0] for words in map(str.split, lines) if words} - {"#"}
    curve = CurveKeys(value["public"], value["secret"], server, frozenset(keys))
    for key in (curve.public, curve.secret, *([server] if server else []), *curve.allowed):
        if not isinstance(key, str) or not _Z85_KEY.fullmatch(key):
            raise ConfigError(f"{path}: not a CURVE key of 40 Z85 characters: {str(key)[:8]}...")
    return curve


def _allowed_lines(path: Path) -> list[str]:
    """Return the lines of a file of keys, in which a comment may have any encoding."""
    try:
        return path.read_bytes().decode("utf-8-sig", "replace").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the allowed keys: {error.strerror}") from None


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_secure(endpoint: str, curve: CurveKeys | None) -> None:
    """Raise ConfigError for an address that other hosts can reach, unless keys protect it.

    ipc:// and inproc:// are private by their directory; tcp:// to loopback is allowed.
    """
    transport, _, rest = endpoint.partition("://")
    if transport in ("ipc", "inproc"):
        return
    if transport != "tcp" or not rest:
        raise ConfigError(f"endpoint {endpoint}: want ipc://PATH or tcp://HOST:PORT")
    if curve is None and not _is_loopback(endpoint):
        raise ConfigError(
            f"endpoint {endpoint} needs CURVE keys: anyone who can reach it could feed the run; "
            "set bus.keys, or use ipc:// or 127.0.0.1"
        )


def _is_loopback(endpoint: str) -> bool:
    try:
        return is_loopback(urlsplit(endpoint).hostname or "")
    except ValueError:
        return False
