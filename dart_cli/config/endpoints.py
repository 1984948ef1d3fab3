"""Where the processes of a run meet: addresses, keys and folders, derived from its configuration.

run_endpoints  the addresses of the data service and the trainer
own_address    this host's address on the run's network
run_curve      the CURVE keys of a run over tcp
weights_dir    the folder where weight sets are written
DEADLINE_S     seconds that a request may take
STALL_S        seconds without progress that are a stall
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from bus.endpoints import (
    DATA,
    TELEMETRY_IN,
    TELEMETRY_OUT,
    TRAIN,
    CurveKeys,
    Endpoints,
    read_curve,
)
from bus.errors import ConfigError
from dart_cli.config.schema import Config

DEADLINE_S = 30.0
"""Seconds that a request may take; after that it is an error that names both processes."""
STALL_S = 20.0
"""Seconds without progress after which `dart status` and the log report which process waits for which."""

KEY_FILE = "curve.json"
"""The file in a folder of keys that `dart keys` writes."""


def run_endpoints(config: Config) -> Endpoints:
    """Return the addresses of the data service and the trainer: sockets in the run directory, or tcp.

    The trainer listens only if it broadcasts its weights.
    """
    if config.bus.transport == "ipc":
        return Endpoints(config.run.dir)
    names = (DATA, TELEMETRY_IN, TELEMETRY_OUT, TRAIN)
    tcp = {
        name: f"tcp://{config.bus.host}:{config.bus.port + index}"
        for index, name in enumerate(names)
    }
    return Endpoints(config.run.dir, tcp)


def run_curve(config: Config) -> CurveKeys | None:
    """Return the run's CURVE keys, one pair, from `curve.json` in `bus.keys`; every host has a copy of it.

    Return None if `bus.keys` is unset. Raises ConfigError if the file is missing, malformed or readable by other users.
    """
    if config.bus.keys is None:
        return None
    path = config.bus.keys / KEY_FILE
    public = read_curve(path).public
    return replace(read_curve(path, server=public), allowed=frozenset({public}))


def own_address(config: Config) -> str:
    """Return this host's address on the run's network; nothing is sent.

    Raises ConfigError if there is no route.
    """
    if config.bus.transport == "ipc":
        return "127.0.0.1"
    host = config.bus.host
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, config.bus.port))
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # UnicodeError: a name such as a..b
        why = error.strerror if isinstance(error, OSError) else "it is not the name of a host"
        raise ConfigError(
            f"bus.host = {host!r} cannot be reached from here: {why}; "
            "name the host of `dart data` by an IPv4 address or a name that resolves"
        ) from None


def weights_dir(config: Config) -> Path:
    """Return the folder where the run's weight sets are written."""
    return config.weights.directory or config.run.dir / "weights"
