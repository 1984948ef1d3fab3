"""A run on a cluster, from its first reservation to its end.

    run_on_cluster   finds a home on the cluster for a block, and yields the ClusterRun
    ClusterRun       has the configuration with its addresses, and starts processes for `dart up`
    prepare_keys     writes the keys of the run: the user's own, or a new pair

The data process and the trainer share a node, `home`: this host if it is a node with room, else any node.
Both use the run directory itself, so home must see it at the same path as this host. Every other process has
a private folder on its node, and its output and log are copied to the run directory here. Weights are files
in a folder that all nodes see, or are sent over the network, as `weights.channel` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bus.endpoints import make_private_dir, write_key_pair
from bus.errors import DartError, UserError, first_line
from dart_cli.cluster.connection import Cluster
from dart_cli.cluster.demands import Demand, Node, Trainer, env_of, rollout_of, trainer_of
from dart_cli.cluster.placing import WAIT_S, NodeLostError, Place, Placing, Reservation, cause_of
from dart_cli.cluster.process import Ranks, RemoteProcess
from dart_cli.cluster.role_host import CONFIG, SHARED_S, Setup
from dart_cli.config.endpoints import KEY_FILE, weights_dir
from dart_cli.config.load import load_config
from dart_cli.config.rules.check import check_config
from dart_cli.config.schema import Config
from dart_cli.config.values import to_toml
from dart_cli.runtime.logs import log_dir
from dart_cli.runtime.supervisor import RESTARTS, Process

NO_TOKEN = (
    "WARNING this Ray cluster needs no token: anyone who reaches its ports can run commands as you and read the "
    "keys of the run; see docs/box.md, A Ray cluster"
)
_AT_HOME = ("data", "train", "eval")
_ANSWER_S = SHARED_S + 30.0
"""Seconds in which an actor must have started its child, or reported that it cannot."""
_PORTS = 4
"""Number of consecutive ports of the data process and the trainer: see run_endpoints."""
_INHERITED = re.compile(
    r"(GLOO|NCCL|HF|WANDB|VLLM|DART|PYTORCH)_.*|(OMP|MKL|OPENBLAS)_NUM_THREADS|no_proxy|NO_PROXY"
)
"""Environment variables of this process that the children inherit, as they do on one host."""


_T = TypeVar("_T")


class ClusterRun:
    """A run on a cluster. `run_on_cluster` creates it, inside one running event loop."""

    def __init__(
        self, cluster: Cluster, config: Config, path: Path, notice: Callable[[str], None]
    ) -> None:
        self.config = config
        self.arguments: list[str] = []
        self._cluster, self._path, self._notice = cluster, path, notice
        self._placing = Placing(cluster, WAIT_S, notice)
        self._places: dict[str, Place] = {}
        self._processes: dict[str, RemoteProcess] = {}
        self._trainer = Trainer((), (), Demand("", 0))
        self._rollouts: dict[str, tuple[Demand, Reservation]] = {}  # by worker name, until placed
        self._home: Node | None = None
        self._reserved: Reservation | None = None
        self._keys = ""
        self._marker = f".cluster-{secrets.token_hex(8)}"

    # --- home -------------------------------------------------------------------------------

    async def settle(self, overrides: Sequence[str], stop: asyncio.Event) -> bool:
        """Find the home of data process and trainer, and load the configuration with its addresses.

        Return True; False if `stop` is set first. Raises UserError if there is no such node, or if it does
        not see the run directory.
        """
        # 1. Reserve the home and place the data process on it.
        if not self._cluster.has_token:
            self._notice(NO_TOKEN)
        nodes = await self._cluster.ask(self._cluster.nodes)
        self._trainer = trainer_of(self.config, nodes)
        home = self._trainer.home
        here = next((node for node in nodes if node.id == self._cluster.here), None)
        has_room = here is not None and here.has_free(home)
        self._reserved = await self._placing.reserve(
            self._trainer.bundles, on=here if has_room else None
        )
        data = self._placing.place(Demand("data", 1), "data", self._reserved)
        self._places["data"] = data
        if not await self._placing.wait_for(data, stop, lambda: True):
            return False
        # 2. Reserve the rollout workers before environments take CPUs on every node.
        for index in range(self.config.up.rollouts):
            demand = rollout_of(self.config, f"rollout-{index}", nodes)
            self._rollouts[demand.name] = (demand, await self._placing.reserve([demand]))
        # 3. Choose the ports, and load the configuration with the addresses of this start.
        assert data.node is not None
        self._home = data.only_on = data.node
        bus = self.config.bus
        port = bus.port
        if bus.transport != "tcp":
            try:
                port = await _answer(data.actor.ports.remote(_PORTS))
            except self._cluster.ray.exceptions.RayActorError as error:
                raise DartError(
                    f"{self._home.host} was lost at the start: {first_line(error)}"
                ) from None
        if not port:
            raise UserError(f"{self._home.host} has no {_PORTS} free ports in a row: set bus.port")
        self._adopt(overrides, port)
        is_here = self._home.id == self._cluster.here
        where = "this host" if is_here else f"{self._home.host} ({self._home.address})"
        self._notice(f"data service and trainer run on {where}, port {port}")
        return True

    def _adopt(self, overrides: Sequence[str], port: int) -> None:
        """Load the configuration of this start, and the command-line arguments that describe it."""
        assert self._home is not None
        run_dir = self.config.run.dir.absolute()
        self._keys = prepare_keys(self.config)
        settings: dict[str, object] = {
            "run.dir": run_dir,
            "bus.host": self._home.address,
            "bus.port": port,
            "bus.keys": run_dir / "keys",
            "up.train_gpus": [],
            "up.rollout_gpus": [],
        }
        if self.config.weights.channel == "file" and not self._cluster.is_local:
            settings["weights.directory"] = weights_dir(self.config).absolute()
        all_overrides = [
            *overrides,
            *(f"{key}={to_toml(value)}" for key, value in settings.items()),
        ]
        self.config = load_config(self._path, all_overrides)
        check_config(self.config, role="data")
        self.arguments = [
            CONFIG,
            *(part for override in all_overrides for part in ("--set", override)),
        ]
        # A start that was killed may have left its markers.
        for marker in run_dir.glob(".cluster-*"):
            marker.unlink(missing_ok=True)
        for folder in self._shared_folders():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / self._marker).touch()

    def _shared_folders(self) -> list[Path]:
        """Return the folders that several nodes must see: of the run and of the weights."""
        folders = [self.config.run.dir]
        if self.config.weights.directory is not None:
            folders.append(self.config.weights.directory)
        return folders

    # --- processes --------------------------------------------------------------------------

    async def start(
        self, name: str, arguments: Sequence[str], ending: asyncio.Event
    ) -> Process | None:
        """Start a command of the run on a node that has room (see StartProcess).

        Raises UserError if no node has room by the deadline, or the node lacks something that the command
        needs.
        """
        try:
            if name == "train" and len(self._trainer.ranks) > 1:
                return await self._start_ranks(arguments, ending)
            return await self._start_one(name, arguments, ending)
        except NodeLostError:
            assert self._home is not None
            # It is not moved: another node has another address, and may not see the run directory.
            raise DartError(
                f"the node {self._home.host} ({self._home.address}), which ran data service and trainer, is lost; "
                f"{self.config.run.dir} is intact: the same command continues the run, on any node that sees it"
            ) from None
        except self._cluster.ray.exceptions.RayError as error:
            raise DartError(f"{name}: Ray cannot start it: {cause_of(error)}") from None

    async def _start_one(
        self,
        name: str,
        arguments: Sequence[str],
        ending: asyncio.Event,
        environment: Mapping[str, str] | None = None,
    ) -> RemoteProcess | None:
        """Start one process as `start` does. `environment` is only for this process."""
        role = name.partition("-")[0]

        async def begin(place: Place) -> RemoteProcess:
            return await self._start_at(name, place, arguments, environment or {})

        return await self._at_place(name, ending, lambda: not self._others_run(name, role), begin)

    async def _at_place(
        self,
        name: str,
        ending: asyncio.Event,
        is_needed: Callable[[], bool],
        work: Callable[[Place], Awaitable[_T]],
    ) -> _T | None:
        """Wait for the place of a command, and return what `work` returns for it; None if `ending` is set.

        If the actor is lost meanwhile, wait and try again. Raises DartError if that happens too often.
        """
        place = await self._place_of(name)
        lost = 0
        while await self._placing.wait_for(place, ending, is_needed):
            try:
                return await work(place)
            except self._cluster.ray.exceptions.RayActorError as error:
                lost += 1
                if lost > RESTARTS:
                    raise DartError(
                        f"{name}: Ray lost its actor {lost} times in a row before it could start: {cause_of(error)}"
                    ) from None
        return None

    async def _start_ranks(self, arguments: Sequence[str], ending: asyncio.Event) -> Process | None:
        """Start a process of `dart train` for each rank, with the variables of torchrun (docs/box.md)."""
        assert self._home is not None
        port = await self._free_port(ending)
        ranks: list[RemoteProcess] = []
        for number, demand in enumerate(self._trainer.ranks if port else ()):
            environment = {
                "RANK": str(number),
                "WORLD_SIZE": str(len(self._trainer.ranks)),
                "LOCAL_RANK": "0",  # each rank sees only its own GPU
                "MASTER_ADDR": self._home.address,
                "MASTER_PORT": str(port),
            }
            process = await self._start_one(demand.name, arguments, ending, environment)
            if process is None:
                break
            ranks.append(process)
        return Ranks(ranks) if ranks else None

    async def _free_port(self, ending: asyncio.Event) -> int:
        """Return a free port on rank 0's node, where the ranks meet; 0 if `ending` is set."""
        first = self.config.bus.port
        excluded = list(range(first, first + _PORTS))

        async def ask(place: Place) -> int:
            return int(await _answer(place.actor.ports.remote(1, excluded)))

        return await self._at_place("train", ending, lambda: True, ask) or 0

    async def _start_at(
        self,
        name: str,
        place: Place,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> RemoteProcess:
        """Start a command at its place, whose actor has just answered, and return its process."""
        node = place.node
        assert node is not None
        problem = await _answer(place.actor.prepare.remote(self._setup(name, place)))
        if problem:
            raise UserError(f"{name} cannot run on {node.host}: {problem}")
        await _answer(place.actor.start.remote(list(arguments), dict(environment)))
        if self._home is not None and node.id != self._home.id:
            self._notice(f"{name} runs on {node.host} ({node.address}, node {node.id[:8]})")
        process = RemoteProcess(place.actor, place.life, node, self._log_of(name), self._lives)
        self._processes[name] = process
        return process

    async def _place_of(self, name: str) -> Place:
        """Return the place of a command, which is the same for each of its starts."""
        other = {"train": "eval", "eval": "train"}.get(name)
        if other in self._places:  # trainer and evaluation use one bundle in turn
            await self._placing.remove([self._places.pop(other)])
        if name not in self._places:
            index = 0  # of the bundle
            if name in _AT_HOME:
                demand, reserved = self._trainer.ranks[0], self._reserved
                demand = self._trainer.evaluation if name == "eval" else demand
            elif name.startswith("train-"):
                index = int(name.partition("-")[2])
                demand, reserved = self._trainer.ranks[index], self._reserved
            elif name.startswith("rollout"):
                demand, reserved = self._rollouts.pop(name)
            else:
                demand, reserved = env_of(name), None
            self._places[name] = self._placing.place(demand, name, reserved, index)
            if name in _AT_HOME:
                self._places[name].only_on = self._home
        return self._places[name]

    def _setup(self, name: str, place: Place) -> Setup:
        """Return the Setup with which the node of a place runs a command."""
        sees_run = name in _AT_HOME or name.startswith("train-")
        run_dir, weights = self.config.run.dir, self.config.weights.directory
        shared = []
        if sees_run:
            problem = (
                f"it does not see run.dir = {run_dir} of this host: start dart up there, or set run.dir to "
                "a folder on a file system that both share"
            )
            shared.append((str(run_dir / self._marker), problem))
        if name.startswith("rollout") and weights is not None:
            problem = (
                f"it does not see the folder of weights, {weights}: set weights.directory to one on a file "
                'system that all nodes share, or weights.channel to "gloo" or "nccl"'
            )
            shared.append((str(weights / self._marker), problem))
        return {
            "config": self._path.read_text(encoding="utf-8"),
            "keys": "" if sees_run else self._keys,
            "cwd": str(Path.cwd()),
            "environment": {k: v for k, v in os.environ.items() if _INHERITED.fullmatch(k)},
            "hides_gpus": not place.demand.gpus,
            "shared": shared,
        }

    def _others_run(self, name: str, role: str) -> bool:
        """Return True if another process of the role runs, so that the run can do without this one."""
        return role in ("env", "rollout") and any(
            other != name and other.partition("-")[0] == role and process.returncode is None
            for other, process in self._processes.items()
        )

    async def _lives(self, node: Node) -> bool:
        """Return True if the cluster still has the node."""
        nodes = await self._cluster.ask(self._cluster.nodes)
        return any(living.id == node.id for living in nodes)

    def _log_of(self, name: str) -> Callable[[bytes], object]:
        """Return a function that appends to the log of a worker in the run directory."""
        path = log_dir(self.config.run.dir) / f"{name}.log"

        def add(more: bytes) -> None:
            with contextlib.suppress(OSError), path.open("ab") as file:
                file.write(more)

        return add

    # --- the end ----------------------------------------------------------------------------

    async def close(self) -> None:
        """End all processes of the run on the nodes, and remove the markers."""
        await self._placing.close()
        for folder in self._shared_folders():
            (folder / self._marker).unlink(missing_ok=True)

    def kill(self) -> None:
        """Kill all processes of the run at once."""
        self._placing.kill()
        self._cluster.abandon()


@contextlib.asynccontextmanager
async def run_on_cluster(
    cluster: Cluster,
    config: Config,
    path: Path,
    overrides: Sequence[str],
    *,
    notice: Callable[[str], None],
    stop: asyncio.Event,
) -> AsyncIterator[ClusterRun]:
    """Find a home for the run on the cluster, yield the run, and end its processes after the block.

    If `stop` is set before there is a home, the run has the original configuration.
    """
    run = ClusterRun(cluster, config, path, notice)
    try:
        await run.settle(overrides, stop)
        yield run
    finally:
        await run.close()


async def _answer(call: Any) -> Any:
    """Return the answer of an actor to `call`.

    Raises RayActorError if the actor is lost, DartError if it does not answer in time.
    """
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await asyncio.wrap_future(call.future())
    except TimeoutError:
        raise DartError(f"an actor of the run did not answer in {_ANSWER_S:g} s") from None


def prepare_keys(config: Config) -> str:
    """Write the key file into the run directory, and return its text. Raises ConfigError."""
    folder = make_private_dir(config.run.dir / "keys")
    target = folder / KEY_FILE
    if config.bus.keys is not None:
        text = (config.bus.keys / KEY_FILE).read_text(encoding="ascii")
    else:
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            write_key_pair(Path(draft) / KEY_FILE)
            text = (Path(draft) / KEY_FILE).read_text(encoding="ascii")
    draft_file = folder / f".{KEY_FILE}"
    handle = os.open(draft_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(text)
    draft_file.replace(target)
    return text
