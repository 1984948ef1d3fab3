"""Promises of fetched files: whole or not at all, fetched once, kept within a bound, shared safely."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bus.errors import EnvError
from envs.suites.osworld import downloads as downloads_module
from envs.suites.osworld.downloads import Downloads


def test_a_file_is_fetched_once(web: Any, tmp_path: Path) -> None:
    for _ in range(2):  # two env processes, say
        assert Downloads(tmp_path / "kept").fetch(f"{web.url}/whole") == b"pears"
    assert web.asked == ["/whole"]
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_a_kept_file_needs_no_web_server(web: Any, tmp_path: Path) -> None:
    downloads = Downloads(tmp_path)
    downloads.fetch(f"{web.url}/whole")
    web.files.clear()
    assert downloads.fetch(f"{web.url}/whole") == b"pears"


def test_slots_that_want_one_file_at_once_fetch_it_once(web: Any, tmp_path: Path) -> None:
    web.files["/large"] = bytes(1 << 22)
    together = threading.Barrier(6)

    def fetch(_: int) -> bytes:
        together.wait()
        return Downloads(tmp_path).fetch(f"{web.url}/large")

    with ThreadPoolExecutor(6) as slots:
        assert set(slots.map(fetch, range(6))) == {bytes(1 << 22)}
    assert web.asked == ["/large"]
    assert len(list(tmp_path.iterdir())) == 1, "no lock and no part is left"


def test_a_server_that_is_busy_is_asked_again(web: Any, tmp_path: Path) -> None:
    assert Downloads(tmp_path).fetch(f"{web.url}/busy") == b"pears"
    assert web.asked == ["/busy"] * 3


@pytest.mark.parametrize(
    ("path", "message", "tries"),
    [("/cut", "broke off 3 bytes before its end", 3), ("/none", "cannot fetch .*404", 1)],
)
def test_an_incomplete_file_is_not_kept(
    web: Any, tmp_path: Path, path: str, message: str, tries: int
) -> None:
    with pytest.raises(EnvError, match=message):
        Downloads(tmp_path).fetch(f"{web.url}{path}")
    assert not list(tmp_path.iterdir())
    assert web.asked == [path] * tries


def test_files_not_used_for_longest_make_room(web: Any, tmp_path: Path) -> None:
    downloads = Downloads(tmp_path, most_gb=25e-9)
    (tmp_path / "notes.txt").write_text("the user's own, which is never removed")
    for number, name in enumerate("abcd"):
        web.files[f"/{name}"] = name.encode() * 10
        downloads.fetch(f"{web.url}/{name}")
        for path in tmp_path.iterdir():  # as if a minute had passed
            used = path.stat().st_mtime - 60
            os.utime(path, (used, used))
        if number:
            downloads.fetch(f"{web.url}/a")
    web.asked.clear()
    for name in "ad":
        downloads.fetch(f"{web.url}/{name}")
    assert web.asked == []
    assert len(list(tmp_path.iterdir())) == 3
    downloads.fetch(f"{web.url}/b")
    assert web.asked == ["/b"]


def test_a_folder_that_cannot_keep_costs_no_episode(
    web: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(downloads_module.os, "fsync", full)
    assert Downloads(tmp_path).fetch(f"{web.url}/whole") == b"pears"
    assert not list(tmp_path.iterdir())
    assert "No space left" in caplog.text


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a/b", "", "http://a b/c"])
def test_only_web_addresses_are_fetched(tmp_path: Path, url: str) -> None:
    with pytest.raises(EnvError):
        Downloads(tmp_path).fetch(url)
