"""Where each process runs: placement groups, actors in them, and what is waited for.

    Reservation   a placement group, and what its bundles ask for
    Place      one process's: a bundle of a placement group, or none, and the actor in it
    Placing    makes places, waits for them, and finds an actor again that Ray started elsewhere
    NodeLostError   the node is gone that a process may not be moved from
    cause_of   the cause of an error of Ray's, in one line

An actor is restarted by Ray on a node that has room, and its placement group is moved whole. How often is
the supervisor's to decide, for which a lost actor is a process that died: Ray would count over the whole run,
and forgets nothing. Each wait tells what it waits for and ends after WAIT_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bus.errors import DartError, UserError, first_line
from dart_cli import __version__
from dart_cli.cluster.connection import Cluster
from dart_cli.cluster.demands import Demand, Node, lacking
from dart_cli.cluster.process import ignore_error
from dart_cli.cluster.role_host import RoleHost

WAIT_S = 600.0
"""Seconds that a process without which the run cannot go on waits for room in the cluster."""
TELL_S = 2.0
"""Seconds after which a wait for room is told."""
SLOW_S = 20.0
"""Seconds after which a wait for a process that has room is told: it imports Ray and dart."""
_ALWAYS = -1
"""Ray's `max_restarts` without a bound."""
CLOSE_S = 5.0
"""Seconds in which an actor must remove what it made, at the end."""
_POLL_S = 0.25


class NodeLostError(DartError):
    """The only node where a process may run is gone."""


@dataclass(frozen=True)
class Reservation:
    """Resources that the cluster keeps for this run, as soon as it has them."""

    group: Any
    bundles: tuple[Demand, ...]

    def is_created(self) -> bool:
        """Whether the cluster has all of it."""
        from ray.util.placement_group import placement_group_table

        return bool(placement_group_table(self.group).get("state") == "CREATED")

    def lacking(self, nodes: list[Node]) -> str:
        """Return what is waited for: the bundle that has least room."""
        for bundle in self.bundles:
            if not any(node.holds(bundle) for node in nodes):
                return lacking(bundle, nodes)
        unmet = [each for each in self.bundles if not any(node.has_free(each) for node in nodes)]
        return lacking((unmet or self.bundles)[0], nodes)


@dataclass
class Place:
    """Of one process."""

    demand: Demand
    actor: Any
    reserved: Reservation | None = None  # none where it may be anywhere
    life: str = ""  # of the actor that answered last
    node: Node | None = None  # where that is
    asked: asyncio.Future[dict[str, Any]] | None = None  # `describe`, until it is answered
    only_on: Node | None = None  # where it must stay


class Placing:
    """The places of one run."""

    def __init__(self, cluster: Cluster, wait_s: float, notice: Callable[[str], None]) -> None:
        self._cluster, self._wait_s = cluster, wait_s
        self._notice = notice
        self._reserved: list[Reservation] = []
        self._places: list[Place] = []

    # --- making -----------------------------------------------------------------------------

    async def reserve(self, bundles: Iterable[Demand], on: Node | None = None) -> Reservation:
        """Return a placement group of these bundles, each on one node; the only one is on node `on`, if given."""
        from ray.util.placement_group import placement_group

        demands = tuple(bundles)
        wanted = [demand.bundle for demand in demands]
        selector = [{"ray.io/node-id": on.id}] if on is not None and len(wanted) == 1 else None
        group = await self._cluster.ask(
            lambda: placement_group(wanted, strategy="PACK", bundle_label_selector=selector)
        )
        made = Reservation(group, demands)
        self._reserved.append(made)
        return made

    def place(
        self, demand: Demand, worker: str, reserved: Reservation | None = None, index: int = 0
    ) -> Place:
        """Return an actor for `worker`, in a bundle of what is reserved, or on whichever node has most room."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where: Any = "SPREAD"
        if reserved is not None:
            where = PlacementGroupSchedulingStrategy(
                reserved.group, placement_group_bundle_index=index
            )
        actor = (
            self._cluster.ray.remote(RoleHost)
            .options(
                num_cpus=demand.cpus,
                num_gpus=demand.gpus,
                max_restarts=_ALWAYS,
                scheduling_strategy=where,
            )
            .remote(worker)
        )
        made = Place(demand, actor, reserved)
        self._places.append(made)
        return made

    # --- waiting ----------------------------------------------------------------------------

    async def found(
        self, place: Place, ending: asyncio.Event, is_needed: Callable[[], bool]
    ) -> bool:
        """Wait until the actor of `place` answers, and note where it is; False once `ending` is set.

        Raises UserError where it has no room by the deadline, and the run cannot do without it
        (`is_needed`), or where its node cannot run it; NodeLostError where it must stay on one that is lost.
        """
        began = time.monotonic()
        told = ""
        while not ending.is_set():
            if await self._answers(place):
                return True
            waited_s = time.monotonic() - began
            if waited_s < TELL_S:
                await self._pause(ending)
                continue
            is_certain, text = await self._awaited(place)
            if waited_s < SLOW_S and not is_certain:
                await self._pause(ending)
                continue
            if waited_s > self._wait_s and is_needed():
                raise UserError(
                    f"waited {waited_s:.0f} s in vain: {text}; add nodes, or lower "
                    "what the configuration asks for"
                )
            reason = text.partition(" the cluster has")[0]  # the numbers change with each neighbour
            if reason != told:
                self._notice(text)
                told = reason
            await self._pause(ending)
        return False

    async def _awaited(self, place: Place) -> tuple[bool, str]:
        """Whether the cluster surely has no room for it, and one line that says what is waited for."""
        nodes = await self._cluster.ask(self._cluster.nodes)
        _refuse_lost(place, [node.id for node in nodes])
        if place.reserved is None:
            # What is taken may be taken by this one, which starts.
            has_room = is_open = any(node.has_free(place.demand) for node in nodes)
            is_open = is_open or any(node.holds(place.demand) for node in nodes)
            text = lacking(place.demand, nodes)
        else:
            has_room = is_open = await self._cluster.ask(place.reserved.is_created)
            text = place.reserved.lacking(nodes)
        starts = f"waits for Ray to start a process for {place.demand.name}"
        return not is_open, starts if has_room else text

    async def _answers(self, place: Place) -> bool:
        """Whether the actor answers; then `place` says where. Raises UserError where it cannot be made."""
        errors = self._cluster.ray.exceptions
        if place.asked is None:
            place.asked = asyncio.wrap_future(place.actor.describe.remote().future())
            place.asked.add_done_callback(ignore_error)
        await asyncio.wait([place.asked], timeout=_POLL_S * 4)
        if not place.asked.done():
            return False
        asked, place.asked = place.asked, None
        try:
            told = asked.result()
        except errors.ActorUnavailableError:
            return False
        except errors.RayError as error:
            raise UserError(
                f"{place.demand.name}: Ray cannot keep its actor: {cause_of(error)}; dart must be installed "
                "on every node, the same version"
            ) from None
        nodes = await self._cluster.ask(self._cluster.nodes)
        _refuse_lost(place, [told["node"]])
        if told["version"] != __version__:
            raise UserError(
                f"{place.demand.name} cannot run on {told['host']}, which has dart {told['version']}; install "
                f"{__version__} there, as here"
            )
        place.life = told["life"]
        place.node = next(
            (node for node in nodes if node.id == told["node"]),
            Node(told["node"], told["host"], ""),
        )
        return True

    async def _pause(self, ending: asyncio.Event) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), _POLL_S)

    # --- the end ----------------------------------------------------------------------------

    async def remove(self, places: Iterable[Place]) -> None:
        """End these actors, and what they started."""
        gone = list(places)
        closing = [asyncio.wrap_future(place.actor.close.remote().future()) for place in gone]
        for each in closing:
            each.add_done_callback(ignore_error)
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)
        for place in gone:
            with contextlib.suppress(self._cluster.ray.exceptions.RayError):
                self._cluster.ray.kill(place.actor)
        self._places = [place for place in self._places if place not in gone]

    async def close(self) -> None:
        """End all actors, and give back what was reserved."""
        from ray.util.placement_group import remove_placement_group

        await self.remove(self._places)
        groups = [each.group for each in self._reserved]
        self._reserved.clear()

        def give_back() -> None:
            for group in groups:
                remove_placement_group(group)

        with contextlib.suppress(DartError):  # the cluster is gone
            await self._cluster.ask(give_back, CLOSE_S)

    def kill(self) -> None:
        """End all actors at once; their children end with them."""
        for place in self._places:
            with contextlib.suppress(self._cluster.ray.exceptions.RayError):
                self._cluster.ray.kill(place.actor)


def _refuse_lost(place: Place, nodes: Iterable[str]) -> None:
    """Raise NodeLostError where the node at which this process must stay is none of `nodes`."""
    if place.only_on is not None and place.only_on.id not in nodes:
        raise NodeLostError(f"the node {place.only_on.host} is lost")


def cause_of(error: BaseException) -> str:
    """Return the cause of an error of Ray's, which stands at the end of a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.partition(" ")[0]]
    return (named or lines or [first_line(error)])[-1][:200]
