"""Promises of shared memory: used where it has room, emptied, and never the only place at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dart_cli.weights import storage
from dart_cli.weights.file import FileChannel, load
from dart_cli.weights.manifest import WEIGHTS, newest_version
from dart_cli.weights.storage import Storage
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(not storage.SHARED.is_dir(), reason="there is no /dev/shm here")


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that stands for /dev/shm."""
    monkeypatch.setattr(storage, "SHARED", tmp_path / "shm")
    storage.SHARED.mkdir()
    return storage.SHARED


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((1000,), float(value)), "b": torch.full((10,), 1.0)}


def content(shared: Path) -> list[Path]:
    return [path for path in shared.glob("dart-*/*") if path.name != "origin"]


def test_tensors_lie_in_private_memory_and_old_ones_are_freed(tmp_path: Path, shared: Path) -> None:
    channel = FileChannel(tmp_path / "weights", keep=2, shared=True)
    channel.resume(tensors(0), 0)
    for version in range(1, 6):
        channel.publish(tensors(version), version)
    assert len(content(shared)) == 2
    [private] = shared.iterdir()
    assert private.stat().st_mode & 0o077 == 0
    for version in (4, 5):
        path = tmp_path / "weights" / f"v{version:06d}"
        assert (path / WEIGHTS).is_symlink()
        assert load(path, tensors(0))["a"][0] == version


def test_the_end_brings_what_is_kept_to_disk(tmp_path: Path, shared: Path) -> None:
    channel = FileChannel(tmp_path / "weights", keep=2, shared=True)
    channel.resume(tensors(0), 0)
    for version in (1, 2):
        channel.publish(tensors(version), version)
    channel.close()
    channel.close()
    assert list(shared.iterdir()) == []
    for version in (1, 2):
        path = tmp_path / "weights" / f"v{version:06d}"
        assert not (path / WEIGHTS).is_symlink()
        assert load(path, tensors(0))["a"][0] == version


def test_without_room_the_disk_is_used(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "free_shared_memory", lambda: 1000)
    channel = FileChannel(tmp_path / "weights", shared=True)
    path = channel.publish(tensors(0), 0).path
    assert not (path / WEIGHTS).is_symlink()
    assert content(shared) == []
    channel.close()


def test_without_shared_memory_the_disk_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SHARED", tmp_path / "absent")
    assert storage.free_shared_memory() == 0
    path = FileChannel(tmp_path / "weights", shared=True).publish(tensors(0), 0).path
    assert not (path / WEIGHTS).is_symlink()


def test_after_a_restart_of_the_machine_numbers_still_rise(tmp_path: Path, shared: Path) -> None:
    before = FileChannel(tmp_path / "weights", shared=True)
    before.resume(tensors(0), 0)
    before.publish(tensors(1), 1)
    shutil.rmtree(shared)
    shared.mkdir()
    assert newest_version(tmp_path / "weights") is None
    channel = FileChannel(tmp_path / "weights", shared=True)
    again = channel.resume(tensors(0), 0)
    assert again.policy_version == 2
    assert newest_version(tmp_path / "weights") == again
    channel.close()  # what is gone is no hindrance
    assert newest_version(tmp_path / "weights") == again


def test_memory_whose_process_lives_is_kept_though_its_directory_is_out_of_sight(
    tmp_path: Path, shared: Path
) -> None:
    """Hide the run directory, as from another container that shares /dev/shm."""
    channel = FileChannel(tmp_path / "weights", shared=True)
    path = channel.publish(tensors(3), 0).path
    (tmp_path / "weights").rename(tmp_path / "unseen")
    Storage(tmp_path / "other")
    (tmp_path / "unseen").rename(tmp_path / "weights")
    assert load(path, tensors(0))["a"][0] == 3
    assert channel.publish(tensors(4), 1).path.is_dir()


def test_memory_of_directories_that_are_gone_is_freed(tmp_path: Path, shared: Path) -> None:
    for name in ("removed", "moved", "here"):
        FileChannel(tmp_path / name, shared=True).publish(tensors(0), 0)
    shutil.rmtree(tmp_path / "removed")
    (tmp_path / "moved").rename(tmp_path / "elsewhere")
    assert len(content(shared)) == 3
    Storage(tmp_path / "another")
    assert len(content(shared)) == 1
    assert load(tmp_path / "here" / "v000000", tensors(0))["a"][0] == 0


def test_a_private_directory_that_is_not_private_is_not_used(tmp_path: Path, shared: Path) -> None:
    (tmp_path / "weights").mkdir()
    name = f"dart-{os.getuid()}-{storage._key(tmp_path / 'weights')}"
    (shared / name).mkdir(mode=0o755)
    (shared / name).chmod(0o755)
    path = FileChannel(tmp_path / "weights", shared=True).publish(tensors(0), 0).path
    assert not (path / WEIGHTS).is_symlink()


_KILLED = """
import os, sys, torch
from pathlib import Path
from dart_cli.weights import storage
from dart_cli.weights.file import FileChannel
storage.SHARED = Path(sys.argv[2])
channel = FileChannel(Path(sys.argv[1]), keep=2, shared=True)
for version in range(3):
    channel.publish({"a": torch.full((1000,), float(version)), "b": torch.ones(10)}, version)
os.kill(os.getpid(), 9)
"""


def test_a_killed_trainer_goes_on_with_what_it_left(tmp_path: Path, shared: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path / "weights"), str(shared)],
        cwd=Path(__file__).parents[2],
        check=False,
        timeout=PATIENCE_S,
    )
    channel = FileChannel(tmp_path / "weights", keep=2, shared=True)
    assert channel.resume(tensors(2), 1).policy_version == 2
    channel.publish(tensors(3), 3)
    assert len(content(shared)) == 2
