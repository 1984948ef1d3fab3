"""The addresses of a run, derived from its configuration."""

from __future__ import annotations

import tomllib
from typing import Any

from dart_cli.config.endpoints import run_endpoints
from dart_cli.config.schema import Config


def test_tcp_takes_three_ports_in_a_row() -> None:
    tree: dict[str, Any] = tomllib.loads('[bus]\nhost = "127.0.0.1"\nport = 9000\n')
    endpoints = run_endpoints(Config.model_validate(tree))
    names = ("data", "telemetry-in", "telemetry-out")
    assert [endpoints.address(name) for name in names] == [
        f"tcp://127.0.0.1:{port}" for port in (9000, 9001, 9002)
    ]
