"""An exploration finds what there is, once; leaves alone what it should; and goes on after a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bus.errors import EnvError
from dart_cli.config.schema import EnvConfig
from dart_cli.explore.choosing import Candidate, deny_list
from dart_cli.explore.explorer import Exploration, KindRates, Plan, StartPoint
from dart_cli.explore.graph import Edge, open_graph, read_graph
from dart_cli.explore.graph_statistics import curve, summary
from dart_cli.player.episodes import in_slots
from envs.contract.elements import Element, performing
from envs.contract.registry import find_task, make_env
from tests.explore.maze_suite import KILL_AT, PAGES, SUITE
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
REACHED = {"/home", "/list", "/item", "/edit", "/saved", "/help", "/#"}  # without "Delete all"


def plan(suite: str = SUITE, task: str = "maze/home", **changes: object) -> Plan:
    start = StartPoint(find_task(suite, task), 0, "app")
    usual = Plan(starts=[start], steps=400, back_every=40, ranking="q", deny=deny_list(), seed=0)
    return replace(usual, **changes)


def explore(
    folder: Path, plan: Plan, *, suite: str = SUITE, slots: int = 1, **options: object
) -> str | None:
    async def run() -> str | None:
        with open_graph(folder) as graph:
            exploration = Exploration(graph, plan)
            numbers = iter(range(slots))
            env = EnvConfig(suite=suite, options=options)
            await in_slots(env, "t", slots, lambda each: exploration.explore(next(numbers), each))
            return exploration.stop_reason

    return asyncio.run(run())


def screens_and_steps(folder: Path) -> tuple[set[str], list[Edge]]:
    with read_graph(folder) as graph:
        return {screen.route for screen in graph.screens()}, graph.edges()


@pytest.mark.parametrize(
    ("ranking", "slots"), [("q", 1), ("q", 3), ("random", 1), ("count", 3), ("recency", 1)]
)
def test_everything_that_can_be_reached_is_found(tmp_path: Path, ranking: str, slots: int) -> None:
    assert explore(tmp_path / "out", plan(ranking=ranking), slots=slots) == "frontier"
    routes, edges = screens_and_steps(tmp_path / "out")
    assert routes == REACHED
    assert {edge.element.name for edge in edges} == {
        name for page in PAGES.values() for name, _ in page if name != "Delete all"
    } - {""}
    assert [edge.step for edge in edges] == [*range(1, len(edges) + 1)]


def test_each_edge_led_where_the_application_leads(tmp_path: Path) -> None:
    explore(tmp_path / "out", plan())
    with read_graph(tmp_path / "out") as graph:
        route = {screen.id: screen.route[1:] for screen in graph.screens()}
        for edge in graph.edges():
            target = dict(PAGES[route[edge.before]])[edge.element.name]
            if target == "!":
                assert (edge.outcome, edge.after) == ("error", None)
                assert "crashed" in edge.detail
            elif target is None:
                assert (edge.outcome, edge.after) == ("none", edge.before)
                typed = edge.action == "type"
                assert edge.detail == ("its picture changed alone" if typed else "nothing changed")
                assert bool(edge.text) == typed
            else:
                assert (edge.outcome, route[edge.after or ""]) == ("moved", target)
        [end] = [screen for screen in graph.screens() if screen.has_ended]
        assert (end.route, end.elements) == ("/#", ())
        assert Counter(edge.outcome for edge in graph.edges())["error"] == 1


def test_the_same_seed_explores_the_same_way(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        explore(tmp_path / name, plan(seed=seed, steps=30))
    runs = [
        [(e.before, e.element, e.text) for e in screens_and_steps(tmp_path / n)[1]] for n in "abc"
    ]
    assert runs[0] == runs[1] != runs[2]


def test_the_deny_list_is_left_alone_until_it_is_allowed(tmp_path: Path) -> None:
    explore(tmp_path / "a", plan(deny=deny_list(["help"])))
    assert screens_and_steps(tmp_path / "a")[0] == REACHED - {"/help"}
    explore(tmp_path / "b", plan(deny=deny_list(allow=["delete"])))
    assert screens_and_steps(tmp_path / "b")[0] == REACHED | {"/gone"}


def test_steps_are_used_up_and_no_more(tmp_path: Path) -> None:
    assert explore(tmp_path / "out", plan(steps=7), slots=3) == "steps"
    assert len(screens_and_steps(tmp_path / "out")[1]) == 7
    assert explore(tmp_path / "out", plan(steps=12), slots=2) == "steps"
    assert len(screens_and_steps(tmp_path / "out")[1]) == 12
    with read_graph(tmp_path / "out") as graph:
        numbers = summary(graph)
        assert numbers["steps"] == 12
        assert numbers["screens"] == curve(graph.screens(), 12)[-1]
        assert numbers["no_op_rate"] == pytest.approx(
            sum(edge.outcome == "none" for edge in graph.edges()) / 12, abs=1e-4
        )


def test_episodes_go_back_to_the_start(tmp_path: Path) -> None:
    explore(tmp_path / "out", plan(back_every=3, ranking="random", steps=60))
    with read_graph(tmp_path / "out") as graph:
        home = graph.starts()[0].screen
        for start in graph.starts():
            steps = graph.edges(episode=start.episode)
            assert start.screen == home
            assert len(steps) <= 3
            assert steps[0].before == home


def test_without_a_model_kinds_that_moved_are_expected_to_move() -> None:
    """By Laplace's rule, within an application alone."""
    rates = KindRates()
    assert rates.rate(("app", "button", "click")) == 0.5
    for outcome in ("moved", "moved", "none", "error"):
        element = Element("button", "Go", (0, 0, 9, 9), ("click",), "0")
        shots = "00", None
        edge = Edge(1, 0, 1, "a", element, "click", "", None, outcome, *shots, "")
        rates.add(edge, "app")
    assert rates.rate(("app", "button", "click")) == pytest.approx(3 / 6)
    assert rates.rate(("app", "field", "type")) == rates.rate(("b", "button", "click")) == 0.5


async def test_what_is_expected_of_a_kind_is_its_prior(tmp_path: Path) -> None:
    with open_graph(tmp_path / "out") as graph:
        exploration = Exploration(graph, plan(steps=1))
        await in_slots(EnvConfig(suite=SUITE), "t", 1, lambda env: exploration.explore(0, env))
        values = exploration._memory.values(graph.starts()[0].screen)
    assert sorted(values)[-2:] == [1.125, 1.125]


def test_q_alone_knows_where_nothing_untried_is_ahead(tmp_path: Path) -> None:
    button = Element("button", "Go", (0, 0, 9, 9), ("click",), "0")
    nothing, little = (Candidate(button, "click", value, 1) for value in (0.0, 0.01))
    with open_graph(tmp_path / "out") as graph:
        by_q = Exploration(graph, plan())
        assert by_q._is_dead_end([nothing, nothing])
        assert not by_q._is_dead_end([nothing, little])
        assert not Exploration(graph, plan(ranking="count"))._is_dead_end([nothing])


KILLED = """
import sys
from pathlib import Path
from tests.explore.test_explorer import explore, plan
explore(Path(sys.argv[1]), plan(ranking="random"), slots=int(sys.argv[2]))
"""


@pytest.mark.parametrize("slots", [1, 3])
def test_a_kill_loses_at_most_the_running_steps(tmp_path: Path, slots: int) -> None:
    out = tmp_path / "out"
    environment = os.environ | {"PYTHONPATH": str(ROOT), KILL_AT: "9"}
    command = [sys.executable, "-c", KILLED, str(out), str(slots)]
    process = subprocess.run(command, env=environment, cwd=ROOT, timeout=PATIENCE_S, check=False)
    assert process.returncode == -signal.SIGKILL
    before = screens_and_steps(out)[1]
    assert 8 - 2 * slots <= len(before) <= 8  # typing takes two steps of the environment
    assert explore(out, plan(), slots=slots) == "frontier"
    routes, edges = screens_and_steps(out)
    assert edges[: len(before)] == before
    assert [edge.step for edge in edges] == [*range(1, len(edges) + 1)]
    assert routes >= REACHED


def test_what_was_tried_before_a_kill_is_remembered(tmp_path: Path) -> None:
    """Going on does nothing twice that is known to lead nowhere, and ends at once where all is known."""
    out = tmp_path / "out"
    explore(out, plan())
    steps_before = len(screens_and_steps(out)[1])
    assert explore(out, plan()) == "frontier"
    assert len(screens_and_steps(out)[1]) == steps_before


def test_environments_that_do_not_begin_end_it(tmp_path: Path) -> None:
    with pytest.raises(
        EnvError, match=r"3 episodes in a row did not begin; the last: .*no display"
    ):
        explore(tmp_path / "out", plan(), broken_resets=1)


def test_a_suite_without_elements_is_explored_by_a_grid(tmp_path: Path) -> None:
    from tests.own_suites import coin_suite

    suite = f"{coin_suite.__name__}:CoinSuite"
    task = next(iter(coin_suite.CoinSuite().tasks))
    explore(tmp_path / "out", plan(suite, task, steps=6), suite=suite)
    edges = screens_and_steps(tmp_path / "out")[1]
    assert {edge.element.role for edge in edges} <= {"cell", "screen"}
    assert len(edges) == 6


def test_an_embedded_application_is_found_whole(tmp_path: Path) -> None:
    """All screens that any path of actions reaches, counted by replaying every path."""
    task = find_task("mini", "mini/page+confirm")
    deny = deny_list()
    env = make_env("mini")
    reached: dict[str, list] = {}
    waiting: list[list] = [[]]
    while waiting:
        path = waiting.pop(0)
        env.reset(seed=0, options={"task": task, "free": True})
        for action in path:
            env.step(action)
        if env.state().id in reached:
            continue
        reached[env.state().id] = path
        waiting += [
            [*path, *performing(element, operation, "a")]
            for element in env.elements()
            for operation in element.actions
            if not deny.denies(element, operation)
        ]
    assert len(reached) > 3
    explore(tmp_path / "out", plan("mini", task.id), suite="mini", slots=2)
    with read_graph(tmp_path / "out") as graph:
        assert {screen.state for screen in graph.screens()} == {*reached}
        assert max(screen.depth for screen in graph.screens()) == max(map(len, reached.values()))
