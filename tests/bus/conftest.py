"""The fixture that the tests of the sockets share."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.endpoints import Endpoints


@pytest.fixture
def address(tmp_path: Path) -> str:
    return Endpoints(tmp_path / "run").address("data")
