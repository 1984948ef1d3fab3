"""A folder of runs is a list, and below it each run's pages; nothing else of the folder is shown."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dart_cli.data.store.open import open_store
from dart_cli.data.workers import process_row
from dart_cli.view.server import runs_in
from tests.data.parts import heartbeat, make_ledger, small_config
from tests.view.parts import Bones, Server, play_shown, serving

ODD = "a run <b>&'\" #1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in ("old", ODD, "live"):
        config = small_config(folder / name)
        with open_store(config.run.dir) as store:
            ledger = make_ledger(config, store)
            for slot in range(4):
                play_shown(ledger, slot, "fail" if slot else "pass")
            if name == "live":
                store.save_processes([process_row(heartbeat("env-0"), time.time())])
            store.commit()
    (folder / "broken").mkdir()
    (folder / "broken" / "run.db").write_bytes(b"no database" * 1000)
    for at, name in enumerate(("broken", "old", ODD, "live")):
        os.utime(folder / name / "run.db", (at, at))
    (folder / "empty").mkdir()
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret"
    config = small_config(elsewhere)
    with open_store(config.run.dir) as store:
        play_shown(make_ledger(config, store), 0)
    (folder / "link").symlink_to(elsewhere)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as server:
        yield server


def test_the_runs_are_listed_the_newest_first_and_a_broken_one_says_so(
    folder: Path, server: Server
) -> None:
    assert [run.name for run in runs_in(folder)] == ["live", ODD, "old", "broken"]
    bones = Bones.of(server.page("/"))
    assert ("b", ()) not in bones.elements
    places = [bones.text.index(name) for name in ("live", ODD, "old", "broken")]
    assert places == sorted(places)
    assert "file is not a database" in bones.text
    assert "secret" not in bones.text
    assert "empty" not in bones.text


def test_every_link_of_every_run_leads_to_a_page(server: Server) -> None:
    seen, waiting = set(), ["/"]
    while waiting:
        path = waiting.pop().partition("#")[0] or "/"
        if path in seen:
            continue
        seen.add(path)
        answer = server.get(path)
        assert answer.status == (503 if path == "/runs/broken/" else 200), path
        if answer.status == 200 and answer.headers["content-type"].startswith("text/html"):
            waiting += [link for link in Bones.of(answer.text).links if not link.startswith("?")]
    odd = "/runs/a%20run%20%3Cb%3E%26%27%22%20%231"
    assert {"/runs/live/", "/runs/old/trajectories/g000001-00", f"{odd}/groups/g000001"} <= seen


@pytest.mark.parametrize(
    "path",
    [
        "/runs/link/",
        "/runs/empty/",
        "/runs/../",
        "/runs/%2e%2e/",
        "/runs/..%2felsewhere0%2fsecret/",
        "/runs/live/../../etc/passwd",
        "/runs/live/%2e%2e/old/",
        "/runs/live/run.db",
        "/runs//live/",
        "/live/",
        "/trajectories",
    ],
)
def test_no_path_leads_out_of_the_runs(path: str, server: Server) -> None:
    answer = server.get(path)
    assert answer.status == 404
    assert b"SQLite" not in answer.body


def test_each_run_is_guarded_as_the_list_is(server: Server, folder: Path) -> None:
    for path in ("/", "/runs/live/", "/runs/nothing/", "/runs/live/trajectories/what"):
        assert server.get(path, Host="evil.example").status == 421
        assert "default-src 'none'" in server.get(path).headers["content-security-policy"]
    with serving(folder, token="x") as closed:
        assert closed.get("/runs/live/").status == 403


def test_a_folder_that_is_moved_away_has_no_runs(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    with serving(folder) as server:
        assert "There is no run in this folder any more" in server.page("/")
        folder.rmdir()
        assert "There is no run in this folder any more" in server.page("/")
        assert server.get("/runs/a/").status == 404
