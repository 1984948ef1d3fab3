"""Waiting for a process's place, on a cluster that is played."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bus.errors import UserError
from dart_cli import __version__
from dart_cli.cluster import placing
from dart_cli.cluster.demands import Demand, Node
from dart_cli.cluster.placing import NodeLostError, Place, Placing
from tests.waiting import PATIENCE_S


class LostActorError(Exception):
    """As Ray's."""


class UnavailableError(LostActorError):
    """As Ray's, of an actor that is being restarted."""


class Cluster:
    """Its nodes, and actors that answer when a test says so."""

    def __init__(self, *nodes: Node) -> None:
        errors = SimpleNamespace(RayError=LostActorError, ActorUnavailableError=UnavailableError)
        self.ray = SimpleNamespace(exceptions=errors)
        self.living = list(nodes)

    def nodes(self) -> list[Node]:
        return self.living

    async def ask(self, call: Callable[[], Any], within_s: float = 1.0) -> Any:
        return call()


class Actor:
    """One whose answers are given by hand."""

    def __init__(self) -> None:
        self.answers: list[concurrent.futures.Future[Any]] = []
        self.describe = SimpleNamespace(remote=self._remote)

    def _remote(self) -> Any:
        self.answers.append(concurrent.futures.Future())
        return SimpleNamespace(future=lambda: self.answers[-1])

    async def asked(self, times: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.answers) < times:  # noqa: ASYNC110 - set by the code under test
                await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "TELL_S", 0.0)
    monkeypatch.setattr(placing, "SLOW_S", 0.0)
    monkeypatch.setattr(placing, "_POLL_S", 0.01)


BOX = Node("1", "box", "10.0.0.1", 4, 0, free_cpus=0)


def waits(cluster: Cluster, wait_s: float = PATIENCE_S) -> tuple[Placing, list[str]]:
    messages: list[str] = []
    return Placing(cluster, wait_s, messages.append), messages  # type: ignore[arg-type]


async def test_a_place_is_found_again_after_its_actor_was_restarted_elsewhere() -> None:
    other = Node("2", "other", "10.0.0.2", 4, 0, free_cpus=4)
    made, output = waits(Cluster(BOX, other))
    place = Place(Demand("env-0", 1), actor := Actor())
    finding = asyncio.create_task(made.wait_for(place, asyncio.Event(), lambda: True))
    await actor.asked(1)
    actor.answers[0].set_exception(UnavailableError())
    await actor.asked(2)
    actor.answers[1].set_result({"life": "b", "node": "2", "host": "other", "version": __version__})
    assert await asyncio.wait_for(finding, PATIENCE_S)
    assert (place.life, place.node) == ("b", other)
    assert output in ([], ["waits for Ray to start a process for env-0"])


def test_ray_starts_an_actor_again_however_often_it_was_lost_in_a_run_of_days() -> None:
    """The supervisor decides how often is too often, since it forgets what was long ago."""
    given: dict[str, Any] = {}

    class Class:
        def options(self, **options: Any) -> Class:
            given.update(options)
            return self

        def remote(self, _worker: str) -> Actor:
            return Actor()

    cluster = Cluster(BOX)
    cluster.ray.remote = lambda _: Class()
    made, _ = waits(cluster)
    made.place(Demand("env-0", 1), "env-0")
    assert given["max_restarts"] == -1


async def test_a_wait_is_told_once_and_ends_the_run_by_the_deadline_if_it_is_needed() -> None:
    made, output = waits(Cluster(BOX), wait_s=0.1)
    place = Place(Demand("env-0", 1), Actor())
    text = "waits for 1 node with 1 CPU for env-0: the cluster has 0 of 4 CPUs free"
    with pytest.raises(UserError, match=r"in vain: waits for 1 node with 1 CPU"):
        await asyncio.wait_for(made.wait_for(place, asyncio.Event(), lambda: True), PATIENCE_S)
    assert output == [text]


async def test_a_process_that_the_run_can_do_without_waits_until_the_end() -> None:
    made, output = waits(Cluster(BOX), wait_s=0.0)
    ending, turns = asyncio.Event(), 0

    def is_needed() -> bool:
        nonlocal turns
        turns += 1
        if turns == 3:
            ending.set()
        return False

    place = Place(Demand("rollout-1", 1), Actor())
    assert not await asyncio.wait_for(made.wait_for(place, ending, is_needed), PATIENCE_S)
    assert len(output) == 1


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_process_that_must_stay_is_not_moved_when_its_node_is_lost(
    restarted: bool,
) -> None:
    other = Node("2", "other", "10.0.0.2", 4, 0, free_cpus=4)
    made, _ = waits(Cluster(other, *([BOX] if restarted else [])))
    place = Place(Demand("data", 1), actor := Actor(), only_on=BOX)
    finding = asyncio.create_task(made.wait_for(place, asyncio.Event(), lambda: True))
    if restarted:
        await actor.asked(1)
        actor.answers[0].set_result(
            {"life": "b", "node": "2", "host": "other", "version": __version__}
        )
    with pytest.raises(NodeLostError, match="the node box is lost"):
        await asyncio.wait_for(finding, PATIENCE_S)


async def test_another_version_of_dart_is_refused_with_the_node_that_has_it() -> None:
    made, _ = waits(Cluster(BOX))
    place = Place(Demand("env-0", 1), actor := Actor())
    finding = asyncio.create_task(made.wait_for(place, asyncio.Event(), lambda: True))
    await actor.asked(1)
    actor.answers[0].set_result({"life": "a", "node": "1", "host": "box", "version": "0.0.1"})
    with pytest.raises(
        UserError, match=r"env-0 cannot run on box, which has dart 0\.0\.1; install"
    ):
        await asyncio.wait_for(finding, PATIENCE_S)


async def test_an_actor_that_cannot_be_made_is_one_line() -> None:
    made, _ = waits(Cluster(BOX))
    place = Place(Demand("env-0", 1), actor := Actor())
    finding = asyncio.create_task(made.wait_for(place, asyncio.Event(), lambda: True))
    await actor.asked(1)
    actor.answers[0].set_exception(
        LostActorError(
            "The actor died.\n  File x\nModuleNotFoundError: No module named 'dart_cli'\n"
        )
    )
    with pytest.raises(
        UserError, match="No module named 'dart_cli'; dart must be installed on every"
    ):
        await asyncio.wait_for(finding, PATIENCE_S)
