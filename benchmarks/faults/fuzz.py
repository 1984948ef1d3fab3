"""Does any random or mutated message, or truncated file of a run, break a process or change the run?

    python benchmarks/faults/fuzz.py --messages 1000000 --configs 20000 --run RUN --files 2000 [--seed 0]

messages   at the data service's request address, both ends of its telemetry, and a rollout worker's address: frames
           of noise, valid messages with bytes flipped, cut, doubled or moved (results that are valid are
           left out), wrong and repeated ids. None is lost on the way, and each with an id is answered.
           Then the run must be unchanged and must answer.
requests   a tenth as many: well-formed requests and heartbeats with random values, which may change the
           run but must never break a handler or the process
files      each file of a run is cut at a random place; its readers must work or report why not
configs    mutated configurations: valid, or one line with a fix

The last line is JSON; `crashed`, `unanswered` and `changed` must be 0 and the lists empty, else the exit
code is 1. A hang ends in a DeadlineError. Tests run the same with small numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import zmq

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.faults.fuzz_messages import (  # noqa: E402 - after the path
    mutated,
    random_message,
    strangers,
)
from bus.codec import MESSAGES, decode, encode  # noqa: E402
from bus.endpoints import DATA, TELEMETRY_IN, TELEMETRY_OUT  # noqa: E402
from bus.errors import DartError, ProtocolError  # noqa: E402
from bus.messages import ErrorReply, Heartbeat, Request, StatusReply, StatusRequest, StopRequest  # noqa: E402
from bus.requests import Requester  # noqa: E402
from bus.snapshot import Snapshot  # noqa: E402
from bus.weights import WeightsPublished  # noqa: E402
from dart_cli.config.endpoints import run_endpoints  # noqa: E402
from dart_cli.config.load import load_config  # noqa: E402
from dart_cli.config.rules.check import check_config  # noqa: E402
from dart_cli.config.schema import Config  # noqa: E402
from dart_cli.data import service  # noqa: E402
from dart_cli.data.store.open import open_reader, open_store  # noqa: E402

BURST = 200
"""Messages between two turns of the event loop, in which the services read them."""
SAY_S = 10.0
DEADLINE_S = 60.0


# --- messages ---------------------------------------------------------------------------------


def ledger_of(run_dir: Path) -> object:
    """Return everything in a run's database that messages could change."""
    with open_reader(run_dir) as reader:
        return (
            reader.groups(),
            reader.trajectories(),
            reader.batches(),
            reader.metrics(),
            reader.newest_version(),
            reader.task_progress(),
            reader.decisions(),
            reader.total("steps"),
            reader.total("screenshots"),
            reader.syncs(),
        )


@contextlib.asynccontextmanager
async def served(config: Config) -> AsyncIterator[dict[str, str]]:
    """Start a data service and a rollout worker with weights; yield the address of every socket by name."""
    from dart_cli.rollout import worker

    stop = asyncio.Event()
    parts = [
        asyncio.create_task(service.run(config, stop)),
        asyncio.create_task(worker.run(config, "rollout-0", stop)),
    ]
    endpoints = run_endpoints(config)
    names = (DATA, TELEMETRY_IN, TELEMETRY_OUT, "rollout-0")
    try:
        await _give_weights(endpoints.address(DATA), config.run.dir / "fuzz-weights")
        yield {name: endpoints.address(name) for name in names}
        for part in parts:
            if part.done():
                part.result()
    finally:
        stop.set()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*parts)


async def _give_weights(address: str, folder: Path) -> None:
    """Publish a weight set and wait until the rollout worker serves it: before that it reads no messages."""
    import torch

    from dart_cli.weights.file import FileChannel

    publication = FileChannel(folder).publish({"w": torch.zeros(1)}, 2)
    message = WeightsPublished(
        policy_version=2, path=str(publication.path), digest=publication.digest, updates=2
    )
    async with (
        asyncio.timeout(DEADLINE_S),
        Requester(address, name="fuzz", peer="dart data") as requester,
    ):
        await requester.request(message, DEADLINE_S)
        while True:
            reply = await requester.request(StatusRequest(), DEADLINE_S)
            assert isinstance(reply, StatusReply)
            if Snapshot.model_validate(reply.snapshot).syncs:
                return
            await asyncio.sleep(0.05)


async def _is_up(address: str) -> None:
    """Wait until the data service answers correctly and has received a heartbeat meanwhile.

    Raises DeadlineError, or TimeoutError where the telemetry is dead.
    """
    asked_at = time.time()
    async with (
        asyncio.timeout(DEADLINE_S),
        Requester(address, name="fuzz", peer="dart data") as requester,
    ):
        while True:
            reply = await requester.request(StatusRequest(), DEADLINE_S)
            assert isinstance(reply, StatusReply)
            snapshot = Snapshot.model_validate(reply.snapshot)
            rollouts = [process for process in snapshot.processes if process.worker == "rollout-0"]
            if any(snapshot.now - rollout.heartbeat_age_s > asked_at for rollout in rollouts):
                return
            await asyncio.sleep(0.05)


class _Answers:
    """The answers that come back at a DEALER: how many are still expected, how many tell of a broken handler."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.expected = self.broken = 0
        self._socket = socket

    async def drain(self) -> None:
        """Read until nothing more is wanted. Raises TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    if self.expected <= 0:
                        return
                    await asyncio.sleep(0)  # the service's turn; it may share this loop
                    continue
                self.expected -= 1
                with contextlib.suppress(ProtocolError):
                    answer = decode(frames[1:])
                    self.broken += isinstance(answer, ErrorReply) and " failed at " in answer.error


async def _sent(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
    """Send once there is room."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(zmq.Again):
                socket.send_multipart(frames, zmq.NOBLOCK)
                return
            await asyncio.sleep(0.001)


class _Progress:
    """A line of progress on stderr, at most once in SAY_S seconds."""

    def __init__(self, what: str, of: int) -> None:
        self._what, self._of = what, of
        self._began = self._last_line = time.monotonic()

    def tell(self, completed: int) -> None:
        """Print the progress after `completed` items, at most once in SAY_S seconds."""
        if (now := time.monotonic()) - self._last_line >= SAY_S:
            self._last_line = now
            pace = completed / (now - self._began)
            print(f"{completed:,} of {self._of:,} {self._what}, {pace:,.0f}/s", file=sys.stderr)


KINDS = {DATA: zmq.DEALER, "rollout-0": zmq.DEALER, TELEMETRY_IN: zmq.XPUB, TELEMETRY_OUT: zmq.XSUB}
"""What a stranger speaks to each socket with. An XPUB may be told not to drop, a PUB may not."""


def _open(address: str, kind: int) -> zmq.Socket[bytes]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    if kind == zmq.XPUB:
        socket.setsockopt(zmq.XPUB_NODROP, 1)
    if kind == zmq.XSUB:
        socket.setsockopt(zmq.SNDHWM, 0)  # it would drop what it has no room for
    socket.connect(address)
    return socket


async def fuzz_sockets(config: Config, count: int, seed: int) -> dict[str, Any]:
    """Send `count` invalid messages, spread over all sockets; return what broke or changed."""
    chance = random.Random(seed)
    async with served(config) as addresses:
        await _is_up(addresses[DATA])
        before = ledger_of(config.run.dir)
        sockets = {name: _open(addresses[name], kind) for name, kind in KINDS.items()}
        answers = {n: _Answers(sockets[n]) for n, kind in KINDS.items() if kind == zmq.DEALER}
        sent: Counter[str] = Counter()
        progress, began = _Progress("messages", count), time.monotonic()
        sockets[TELEMETRY_IN].poll(int(1000 * DEADLINE_S))  # its subscriber, else all is dropped
        try:
            for number, frames in enumerate(strangers(count, chance)):
                name = chance.choice(list(KINDS))
                sent[name] += 1
                if name in answers:
                    length = chance.choice([16, 16, 16, chance.randrange(40)])
                    key = chance.choice([b"\1" * 16, chance.randbytes(length)])
                    answers[name].expected += len(key) == 16
                    await _sent(sockets[name], [key, *frames])
                elif KINDS[name] == zmq.XSUB:
                    # A frame a message: it keeps parts of longer ones back and then aborts itself.
                    for frame in frames:
                        await _sent(sockets[name], [frame])
                else:
                    await _sent(sockets[name], frames or [b""])
                if number % BURST == 0:
                    for answer in answers.values():
                        await answer.drain()
                    progress.tell(number)
            for answer in answers.values():
                await answer.drain()
            await _is_up(addresses[DATA])
            pace = count / (time.monotonic() - began)
        finally:
            for socket in sockets.values():
                socket.close(linger=0)
        changed = ledger_of(config.run.dir) != before
    return {
        "messages": count,
        "messages_by_socket": dict(sorted(sent.items())),
        "messages_per_s": round(pace),
        "crashed": sum(answer.broken for answer in answers.values()),
        "unanswered": sum(answer.expected for answer in answers.values()),
        "changed": int(changed),
    }


async def fuzz_requests(config: Config, count: int, seed: int) -> dict[str, Any]:
    """Send the data service `count` well-formed requests of random values; return how many broke a handler."""
    chance = random.Random(seed)
    kinds = [k for k in MESSAGES.values() if issubclass(k, Request) and k is not StopRequest]
    async with served(config) as addresses:
        await _is_up(addresses[DATA])
        asking, telling = (_open(addresses[name], KINDS[name]) for name in (DATA, TELEMETRY_IN))
        answers = _Answers(asking)
        progress, began = _Progress("requests", count), time.monotonic()
        try:
            for number in range(count):
                try:
                    request = encode(random_message(chance.choice(kinds), chance))
                    heartbeat = encode(random_message(Heartbeat, chance))
                except ProtocolError:  # an int that msgpack cannot carry
                    continue
                await _sent(asking, [chance.randbytes(16), *request])
                await _sent(telling, heartbeat)
                if number % BURST == 0:
                    await asyncio.sleep(0.01)
                    await answers.drain()
                    progress.tell(number)
            await _is_up(addresses[DATA])
            await answers.drain()
            pace = count / (time.monotonic() - began)
        finally:
            asking.close(linger=0)
            telling.close(linger=0)
    return {
        "requests": count,
        "requests_per_s": round(pace),
        "requests_crashed": answers.broken,
    }


# --- files ----------------------------------------------------------------------------------


def readers(run_dir: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Return all functions that read files of a run, by name."""
    from dart_cli.evaluation.results import read_evaluation
    from dart_cli.inspection.run_lookup import find_subject
    from dart_cli.inspection.trajectories import read_trajectory
    from dart_cli.inspection.trajectory_history import explain_trajectory
    from dart_cli.runtime.liveness import workers_of
    from dart_cli.runtime.run_dir import read_run
    from dart_cli.status.host_processes import why_absent
    from dart_cli.train.checkpoints.checkpoint import load_newest
    from dart_cli.weights.manifest import check_announced, check_files, newest_version

    def read_all() -> None:
        with open_reader(run_dir) as reader:
            ledger_of(run_dir)
            for row in reader.trajectories():
                reader.steps(row.id)
                explain_trajectory(reader, read_trajectory(reader, find_subject(reader, row.id)))
            for batch in reader.batches():
                reader.batch_steps(batch.id)

    def go_on() -> None:
        with open_store(run_dir) as store:
            store.begin_run(0, "{}", [])

    def take_weights() -> None:
        if version := newest_version(run_dir / "weights"):
            check_files(version.path, check_announced(version.path, version.policy_version, ""))

    yield "configuration", lambda: read_run(run_dir)
    yield "database", read_all
    yield "data", go_on
    yield "checkpoint", lambda: load_newest(run_dir / "checkpoints")
    yield "weights", take_weights
    yield "evaluation", lambda: read_evaluation(run_dir, "before")
    yield "workers", lambda: workers_of(run_dir)
    yield "log", lambda: why_absent(run_dir)


def fuzz_files(run_dir: Path, count: int, seed: int) -> dict[str, Any]:
    """Cut `count` files of copies of a finished run; return how many readers broke, and where."""
    chance = random.Random(seed)
    files = sorted(path.relative_to(run_dir) for path in run_dir.rglob("*") if path.is_file())
    crashed: list[str] = []
    for number in range(count):
        victim = files[number % len(files)]
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "run"
            shutil.copytree(run_dir, copy, ignore=_no_sockets)
            os.truncate(copy / victim, chance.randrange((run_dir / victim).stat().st_size + 1))
            crashed += [f"{victim}: {problem}" for problem in _broken(readers(copy))]
    return {"files": count, "files_crashed": sorted(set(crashed))}


def _no_sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_socket()]


def _broken(attempts: Iterable[tuple[str, Callable[[], object]]]) -> Iterator[str]:
    """Yield the errors that are not ours or have more than one line."""
    for name, attempt in attempts:
        try:
            attempt()
        except DartError as error:
            if "\n" in str(error) or not str(error):
                yield f"{name}: {error!r}"
        except Exception as error:  # noqa: BLE001 - what is looked for
            yield f"{name}: {type(error).__name__}: {error}"


def fuzz_configs(count: int, seed: int) -> dict[str, Any]:
    """Mutate the shipped configurations; return how many were neither valid nor refused in one line."""
    chance = random.Random(seed)
    texts = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.toml"))]
    crashed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.toml"
        for _ in range(count):
            lines = chance.choice(texts).splitlines(keepends=True)
            path.write_bytes(b"".join(mutated(lines, chance)))

            def attempt() -> None:
                check_config(load_config(path))

            crashed += _broken([("config", attempt)])
    return {"configs": count, "configs_crashed": sorted(set(crashed))}


def main() -> int:
    """Play all parts and print one line; 1 where something broke."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--configs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, help="a finished run whose files are cut; else none is")
    parser.add_argument("--out", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "fuzz", "seed": arguments.seed}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("strangers", "requests"):
            Path(folder, name).mkdir(mode=0o700)
        strange, options = (
            Config.model_validate(
                {"run": {"dir": Path(folder, name)}, "rollout": {"engine": "scripted"}}
            )
            for name in ("strangers", "requests")
        )
        result |= asyncio.run(fuzz_sockets(strange, arguments.messages, arguments.seed))
        result |= asyncio.run(fuzz_requests(options, arguments.messages // 10, arguments.seed))
    if arguments.run:
        result |= fuzz_files(arguments.run, arguments.files, arguments.seed)
    result |= fuzz_configs(arguments.configs, arguments.seed)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    counts = ("crashed", "unanswered", "changed", "requests_crashed")
    lists = ("files_crashed", "configs_crashed")
    return 1 if any(result.get(name) for name in (*counts, *lists)) else 0


if __name__ == "__main__":
    sys.exit(main())
