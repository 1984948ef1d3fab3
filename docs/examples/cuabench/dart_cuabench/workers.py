"""Gives each worker to one slot, over all processes of a user on this machine."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from bus.errors import EnvError
from envs.contract.blobs import content_hash
from envs.tools.remote.servers import Address, SharedServers


class ExclusiveWorkers:
    """Workers that serve one slot each.

    A lock on a file guards each worker; the kernel releases it when the process ends.
    """

    def __init__(self, addresses: Sequence[Address], folder: Path | None = None) -> None:
        self._shared = SharedServers(addresses)
        self._folder = folder or Path(tempfile.gettempdir()) / f"dart-servers-{os.getuid()}"
        self._locks: dict[Address, IO[str]] = {}
        self._lock = threading.Lock()

    def take(self) -> Address:
        """Return a server that no other slot on this machine uses. Raises EnvError if there is none."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for address in self._shared.in_order():
            file = (self._folder / f"{content_hash(address.http.encode())}.lock").open("a")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                continue
            with self._lock:
                self._locks[address] = file
            self._shared.took(address)
            return address
        raise EnvError(
            "all servers of env.options.url are in use by slots of this machine; each serves one: "
            "name more of them, or set env.slots to their number"
        )

    def give_back(self, address: Address, *, worked: bool = True) -> None:
        """Release a server. One that did not work is tried last from now on."""
        with self._lock:
            file = self._locks.pop(address, None)
        if file is not None:
            self._shared.gave_back(address)
            if not worked:
                self._shared.failed(address)
            file.close()
