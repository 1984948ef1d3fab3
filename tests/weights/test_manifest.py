"""Promises of a weight set's manifest."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bus.errors import WeightsError
from dart_cli.weights.manifest import MANIFEST, WEIGHTS, Published, check_announced, check_files
from tests.waiting import PATIENCE_S
from tests.weights.sets import publish


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return publish({"w": torch.arange(100.0)}, tmp_path, 3)


def test_the_set_that_was_announced_passes(published: Published) -> None:
    assert check_announced(published.path, 3, published.digest).policy_version == 3
    check_files(published.path, check_announced(published.path, 3, ""))


def test_another_digest_or_version_than_announced_is_refused(published: Published) -> None:
    with pytest.raises(WeightsError, match="not the one announced: the digest differs"):
        check_announced(published.path, 3, "0" * 128)
    with pytest.raises(WeightsError, match=" is v3, announced was v4"):
        check_announced(published.path, 4, published.digest)


def exchange(path: Path) -> None:
    """Exchange the file and its manifest: only the announced digest shows it."""
    other = publish({"w": torch.ones(100)}, path.parent / "others", 3)
    for name in (WEIGHTS, MANIFEST):
        (path / name).write_bytes((other.path / name).read_bytes())


def test_a_set_exchanged_as_a_whole_is_refused(published: Published) -> None:
    exchange(published.path)
    check_files(published.path, check_announced(published.path, 3, ""))
    with pytest.raises(WeightsError, match="digest differs"):
        check_announced(published.path, 3, published.digest)


def cut(path: Path) -> None:
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray((path / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (path / WEIGHTS).write_bytes(data)


def lose(path: Path) -> None:
    (path / WEIGHTS).unlink()


def garble(path: Path) -> None:
    (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes()[:-20])


def edit(path: Path) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["size_bytes"] += 1
    (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("damage", [cut, flip, lose, garble, edit])
def test_a_damaged_set_is_not_whole(published: Published, damage: Callable[[Path], None]) -> None:
    damage(published.path)
    with pytest.raises(WeightsError):
        check_files(published.path, check_announced(published.path, 3, ""))


def test_no_torch_is_needed_to_read_it() -> None:
    script = "import sys, dart_cli.weights.manifest; sys.exit('torch' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        check=True,
        timeout=PATIENCE_S,
    )
