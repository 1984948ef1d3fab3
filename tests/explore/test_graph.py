"""The graph's folder: what is written is read back, nothing is half there, depths are shortest paths."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections import deque
from pathlib import Path
from random import Random

import pytest

from bus.errors import RunDirectoryError, UserError
from dart_cli.explore.graph import ExploreSettings, Graph, Sight, open_graph, read_graph, screen_id
from envs.contract.blobs import content_hash
from envs.contract.elements import Element, ScreenState
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG fake "
BUTTON = Element("button", "Next", (1, 2, 30, 14), ("click",), "window/0")


def sight(
    state: str, picture: bytes = b"", *, application: str = "app", ended: bool = False
) -> Sight:
    screen_state = ScreenState(state, f"/{state}", "same route and widgets")
    return Sight(
        application, screen_state, (BUTTON,), PNG + (picture or state.encode()), 64, 48, ended
    )


def edge(graph: Graph, before: str, after: Sight | None, detail: str = "") -> None:
    graph.add_edge(
        episode=1,
        slot=0,
        before=before,
        shot_before="00",
        element=BUTTON,
        action="click",
        after=after,
        detail=detail,
    )


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    settings = ExploreSettings(suite="mini", deny=["pay"])
    with open_graph(tmp_path / "out", settings) as graph:
        start = graph.add_start("mini/a", 3, 1, sight("home"))
        edge(graph, start.screen, sight("list"))
        edge(graph, screen_id("app", "list"), None, "the page broke")
        edge(graph, screen_id("app", "list"), sight("list", b"other"), "nothing happened")
    with read_graph(tmp_path / "out") as graph:
        home, listed = graph.screens()
        assert (home.route, home.depth, home.first_step, home.elements) == (
            "/home",
            0,
            0,
            (BUTTON,),
        )
        assert (listed.depth, listed.first_step, listed.visits, listed.width) == (1, 1, 2, 64)
        moved, broke, stayed = graph.edges()
        assert (moved.outcome, moved.after, moved.element) == ("moved", listed.id, BUTTON)
        assert (broke.outcome, broke.after, broke.shot_after) == ("error", None, None)
        assert (stayed.outcome, stayed.after, stayed.detail) == (
            "none",
            listed.id,
            "nothing happened",
        )
        assert [edge.step for edge in graph.edges(episode=1)] == [1, 2, 3]
        assert graph.starts() == [start]
        assert graph.screenshot(stayed.shot_after or "") == PNG + b"other"
        assert graph.settings() == settings.model_dump()
        [merge] = graph.merges()
        assert (merge.step, merge.screen) == (3, listed.id)
        assert (merge.reason, merge.screenshot) == ("same route and widgets", stayed.shot_after)


def test_two_applications_and_an_end_never_share_a_screen(tmp_path: Path) -> None:
    with open_graph(tmp_path / "out") as graph:
        graph.add_start("a", 0, 0, sight("home"))
        graph.add_start("b", 0, 0, sight("home", application="other"))
        edge(graph, screen_id("app", "home"), sight("home", ended=True))
        assert [screen.elements for screen in graph.screens()] == [(BUTTON,), (BUTTON,), ()]
        assert [screen.has_ended for screen in graph.screens()] == [False, False, True]


def test_depths_are_shortest_known_paths(tmp_path: Path) -> None:
    rng = Random(7)
    names = [str(each) for each in range(12)]
    reached, links = ["0"], set()
    with open_graph(tmp_path / "out") as graph:
        graph.add_start("t", 0, 0, sight("0"))
        for _ in range(40):
            before, after = rng.choice(reached), rng.choice(names)
            edge(graph, screen_id("app", before), sight(after))
            links.add((before, after))
            reached = [*reached, after] if after not in reached else reached
            expected, waiting = {"0": 0}, deque(["0"])
            while waiting:
                at = waiting.popleft()
                for source, target in sorted(links):
                    if source == at and target not in expected:
                        expected[target] = expected[at] + 1
                        waiting.append(target)
            assert {screen.state: screen.depth for screen in graph.screens()} == expected


def test_depths_go_on_from_the_file(tmp_path: Path) -> None:
    with open_graph(tmp_path / "out") as graph:
        graph.add_start("t", 0, 0, sight("a"))
        edge(graph, screen_id("app", "a"), sight("b"))
        edge(graph, screen_id("app", "b"), sight("c"))
        edge(graph, screen_id("app", "c"), sight("d"))
    with open_graph(tmp_path / "out") as graph:
        edge(graph, screen_id("app", "a"), sight("c"))
        assert {screen.state: screen.depth for screen in graph.screens()}["d"] == 2


KILLED = """
import os, sys
from pathlib import Path
from tests.explore.test_graph import edge, sight, screen_id
from dart_cli.explore.graph import open_graph
graph = open_graph(Path(sys.argv[1]))
graph.add_start("t", 0, 0, sight("a"))
edge(graph, screen_id("app", "a"), sight("b"))
graph._connection.execute("BEGIN IMMEDIATE")
graph._connection.execute("UPDATE screens SET visits = 99")
os.kill(os.getpid(), 9)
"""


def test_a_kill_within_a_step_leaves_the_steps_before_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "out")]
    process = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        timeout=PATIENCE_S,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL
    with open_graph(tmp_path / "out") as graph:
        assert [screen.visits for screen in graph.screens()] == [1, 1]
        assert graph.steps == 1
        edge(graph, screen_id("app", "b"), sight("c"))
        assert graph.steps == 2


def test_screenshots_are_private_files_named_by_content(tmp_path: Path) -> None:
    with open_graph(tmp_path / "out") as graph:
        graph.add_start("t", 0, 0, sight("a"))
        graph.add_start("t", 1, 0, sight("a"))
    assert (tmp_path / "out" / "screens").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    [file] = (tmp_path / "out" / "screens").iterdir()
    assert file.name == f"{content_hash(PNG + b'a')}.png"


def test_two_writers_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    with open_graph(tmp_path / "out"), pytest.raises(UserError, match="in use"):
        open_graph(tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years")
    with pytest.raises(UserError, match="no exploration"):
        open_graph(tmp_path / "other")
    with pytest.raises(RunDirectoryError, match=r"graph\.sqlite is missing"):
        read_graph(tmp_path / "other")
    foreign = sqlite3.connect(tmp_path / "other" / "graph.sqlite")
    foreign.execute("CREATE TABLE mine (x)")
    foreign.close()
    with pytest.raises(RunDirectoryError, match="no graph of"):
        read_graph(tmp_path / "other")
