"""Where the processes of a run meet: addresses, keys and folders, derived from its configuration.

run_endpoints  the addresses of the data process
run_curve      the CURVE keys of a run over tcp
weights_dir    where weight sets are written
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bus.endpoints import DATA, TELEMETRY_IN, TELEMETRY_OUT, CurveKeys, Endpoints, read_curve
from dart_cli.config.schema import Config

KEY_FILE = "curve.json"
"""The file in a folder of keys that `dart keys` writes."""


def run_endpoints(config: Config) -> Endpoints:
    """The addresses of the run's data process: below the run directory, or tcp as configured."""
    if config.bus.transport == "ipc":
        return Endpoints(config.run.dir)
    names = (DATA, TELEMETRY_IN, TELEMETRY_OUT)
    tcp = {name: f"tcp://{config.bus.host}:{config.bus.port + i}" for i, name in enumerate(names)}
    return Endpoints(config.run.dir, tcp)


def run_curve(config: Config) -> CurveKeys | None:
    """The run's CURVE keys: one pair, copied to `curve.json` in `bus.keys` of every host.

    Raises ConfigError if the file is missing, malformed or readable by others.
    """
    if config.bus.keys is None:
        return None
    path = config.bus.keys / KEY_FILE
    public = read_curve(path).public
    return replace(read_curve(path, server=public), allowed=frozenset({public}))


def weights_dir(config: Config) -> Path:
    """Where the run's weight sets are written."""
    return config.weights.directory or config.run.dir / "weights"
