"""Place the processes of a run: placement groups, actors in them, and waits for room.

    Reservation     a placement group, and the demands of its bundles
    Place           the place of one process: its actor, and the bundle in which it runs, if any
    Placing         makes places, waits for them, and notices that Ray has restarted an actor elsewhere
    NodeLostError   the error for a lost node from which a process may not be moved
    cause_of        returns the cause of an error of Ray in one line

Ray restarts a lost actor on a node that has room, and moves a placement group as a whole. The supervisor
decides how often: for it a lost actor is a process that died, and it forgets old deaths, whereas Ray would
count them over the whole run. Each wait prints what it waits for, and ends after WAIT_S.
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
"""Seconds for which a process that the run needs waits for room in the cluster."""
TELL_S = 2.0
"""Seconds after which a wait for room is printed."""
SLOW_S = 20.0
"""Seconds after which a wait for a process that has room is printed: it imports Ray and dart."""
_ALWAYS = -1
"""Ray's `max_restarts` for unlimited restarts."""
CLOSE_S = 5.0
"""Seconds in which an actor must clean up at the end."""
_POLL_S = 0.25


class NodeLostError(DartError):
    """The only node on which a process may run is lost."""


@dataclass(frozen=True)
class Reservation:
    """Resources that the cluster reserves for this run as soon as they are free."""

    group: Any
    bundles: tuple[Demand, ...]

    def is_created(self) -> bool:
        """Return True if all resources are reserved."""
        from ray.util.placement_group import placement_group_table

        return bool(placement_group_table(self.group).get("state") == "CREATED")

    def lacking(self, nodes: list[Node]) -> str:
        """Return in words what is waited for: the first bundle for which no node has room."""
        for bundle in self.bundles:
            if not any(node.holds(bundle) for node in nodes):
                return lacking(bundle, nodes)
        unmet = [
            bundle for bundle in self.bundles if not any(node.has_free(bundle) for node in nodes)
        ]
        return lacking((unmet or self.bundles)[0], nodes)


@dataclass
class Place:
    """The place of one process."""

    demand: Demand
    actor: Any
    reserved: Reservation | None = None  # None if it may run anywhere
    life: str = ""  # life of the actor that answered last
    node: Node | None = None  # node of that actor
    # the answer to `describe`, if pending
    pending_description: asyncio.Future[dict[str, Any]] | None = None
    only_on: Node | None = None  # the only node on which it may run


class Placing:
    """The places of one run: it makes them, waits for them, and ends their actors."""

    def __init__(self, cluster: Cluster, wait_s: float, notice: Callable[[str], None]) -> None:
        self._cluster, self._wait_s = cluster, wait_s
        self._notice = notice
        self._reserved: list[Reservation] = []
        self._places: list[Place] = []

    # --- making -----------------------------------------------------------------------------

    async def reserve(self, bundles: Iterable[Demand], on: Node | None = None) -> Reservation:
        """Reserve these bundles, each on one node, and return the reservation.

        A single bundle may be put on node `on`.
        """
        from ray.util.placement_group import placement_group

        demands = tuple(bundles)
        resources = [demand.bundle for demand in demands]
        selector = [{"ray.io/node-id": on.id}] if on is not None and len(demands) == 1 else None
        group = await self._cluster.ask(
            lambda: placement_group(resources, strategy="PACK", bundle_label_selector=selector)
        )
        reservation = Reservation(group, demands)
        self._reserved.append(reservation)
        return reservation

    def place(
        self, demand: Demand, worker: str, reserved: Reservation | None = None, index: int = 0
    ) -> Place:
        """Create an actor for `worker`, in a bundle of `reserved` or on any node, and return its place."""
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
        place = Place(demand, actor, reserved)
        self._places.append(place)
        return place

    # --- waiting ----------------------------------------------------------------------------

    async def wait_for(
        self, place: Place, ending: asyncio.Event, is_needed: Callable[[], bool]
    ) -> bool:
        """Wait until the actor of `place` answers, store its node, and return True; False if `ending` is set.

        Raises UserError if there is no room by the deadline and the run needs the process (`is_needed`), or
        if its node cannot run it. Raises NodeLostError if the only node on which it may run is lost.
        """
        began = time.monotonic()
        last_reason = ""
        while not ending.is_set():
            if await self._answers(place):
                return True
            waited_s = time.monotonic() - began
            if waited_s < TELL_S:
                await self._pause(ending)
                continue
            is_certain, text = await self._wait_in_words(place)
            if waited_s < SLOW_S and not is_certain:
                await self._pause(ending)
                continue
            if waited_s > self._wait_s and is_needed():
                raise UserError(
                    f"waited {waited_s:.0f} s in vain: {text}; add nodes, or lower "
                    "what the configuration asks for"
                )
            reason = text.partition(" the cluster has")[0]  # the free numbers change too often
            if reason != last_reason:
                self._notice(text)
                last_reason = reason
            await self._pause(ending)
        return False

    async def _wait_in_words(self, place: Place) -> tuple[bool, str]:
        """Return (True if the cluster surely has no room for a place, one line on what is waited for)."""
        nodes = await self._cluster.ask(self._cluster.nodes)
        _refuse_lost(place, [node.id for node in nodes])
        if place.reserved is None:
            # The starting process itself may have taken the resources that are not free.
            has_room = is_open = any(node.has_free(place.demand) for node in nodes)
            is_open = is_open or any(node.holds(place.demand) for node in nodes)
            text = lacking(place.demand, nodes)
        else:
            has_room = is_open = await self._cluster.ask(place.reserved.is_created)
            text = place.reserved.lacking(nodes)
        starts = f"waits for Ray to start a process for {place.demand.name}"
        return not is_open, starts if has_room else text

    async def _answers(self, place: Place) -> bool:
        """Return True if the actor answers, and store its node in `place`.

        Raises UserError if it cannot be created.
        """
        errors = self._cluster.ray.exceptions
        if place.pending_description is None:
            place.pending_description = asyncio.wrap_future(place.actor.describe.remote().future())
            place.pending_description.add_done_callback(ignore_error)
        await asyncio.wait([place.pending_description], timeout=_POLL_S * 4)
        if not place.pending_description.done():
            return False
        answer, place.pending_description = place.pending_description, None
        try:
            description = answer.result()
        except errors.ActorUnavailableError:
            return False
        except errors.RayError as error:
            raise UserError(
                f"{place.demand.name}: Ray cannot keep its actor: {cause_of(error)}; dart must be installed "
                "on every node, the same version"
            ) from None
        nodes = await self._cluster.ask(self._cluster.nodes)
        _refuse_lost(place, [description["node"]])
        if description["version"] != __version__:
            raise UserError(
                f"{place.demand.name} cannot run on {description['host']}, which has dart {description['version']}; install "
                f"{__version__} there, as here"
            )
        place.life = description["life"]
        place.node = next(
            (node for node in nodes if node.id == description["node"]),
            Node(description["node"], description["host"], ""),
        )
        return True

    async def _pause(self, ending: asyncio.Event) -> None:
        """Wait for `_POLL_S`, or until `ending` is set."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), _POLL_S)

    # --- the end ----------------------------------------------------------------------------

    async def remove(self, places: Iterable[Place]) -> None:
        """End the actors of these places, and what they started."""
        removed = list(places)
        closing = [asyncio.wrap_future(place.actor.close.remote().future()) for place in removed]
        for answer in closing:
            answer.add_done_callback(ignore_error)
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)
        for place in removed:
            with contextlib.suppress(self._cluster.ray.exceptions.RayError):
                self._cluster.ray.kill(place.actor)
        self._places = [place for place in self._places if place not in removed]

    async def close(self) -> None:
        """End all actors, and release the reservations."""
        from ray.util.placement_group import remove_placement_group

        await self.remove(self._places)
        groups = [reservation.group for reservation in self._reserved]
        self._reserved.clear()

        def release() -> None:
            for group in groups:
                remove_placement_group(group)

        with contextlib.suppress(DartError):  # the cluster is gone
            await self._cluster.ask(release, CLOSE_S)

    def kill(self) -> None:
        """End all actors at once; their children end with them."""
        for place in self._places:
            with contextlib.suppress(self._cluster.ray.exceptions.RayError):
                self._cluster.ray.kill(place.actor)


def _refuse_lost(place: Place, nodes: Iterable[str]) -> None:
    """Raise NodeLostError if the only node on which the process may run is not among `nodes` (ids)."""
    if place.only_on is not None and place.only_on.id not in nodes:
        raise NodeLostError(f"the node {place.only_on.host} is lost")


def cause_of(error: BaseException) -> str:
    """Return the cause of an error of Ray, which is the last line of the traceback in its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(" ")[0]]
    return (errors or lines or [first_line(error)])[-1][:200]
