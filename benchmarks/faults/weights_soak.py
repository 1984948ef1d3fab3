"""Do four workers under load always serve published weights while every side is killed and stopped?

    python benchmarks/faults/weights_soak.py [--updates 200] [--every 0.8] [--workers 4] [--kill-every 8]
                                      [--channel gloo] [--out benchmarks/results/weights_soak.json]

`dart data`, `dart rollout` workers with the transformers engine, and a trainer that publishes another random
step of a small model's weights each `--every` seconds over the run's own channel. Clients ask the workers
without pause, through the router that environments use. Meanwhile the sides take turns: SIGKILL of the
trainer, a worker and the data service (each is started again), SIGSTOP of a worker and of the trainer for longer than
a broadcast's deadline, then SIGCONT.

The last line is JSON. Must be 0: `aborted` (requests that a client got no whole completion to),
`wrong_spans` (spans that leave gaps, go back, or name a version that was not published), `hanging`
(workers that do not serve the last version `SETTLE_S` after the kills have ended) and `ended_alone`
(processes that ended without being killed); else the exit code is 1. `span_max_abs_diff`: a sample of the
completions that several versions sampled is computed again token for token, over one cache, with the weights
that each span names, which are made anew from the version's number.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.endpoints import DATA, TELEMETRY_OUT, TRAIN
from bus.errors import DartError
from bus.messages import ActRequest, Completion, Heartbeat, HelloReply, Sampling, TrainerHello
from bus.pubsub import Subscriber
from bus.requests import Replier, Requester
from bus.weights import WeightsPublished
from dart_cli.config.endpoints import run_curve, run_endpoints, weights_dir
from dart_cli.config.load import load_config
from dart_cli.config.schema import Config
from dart_cli.data.store.open import open_reader
from dart_cli.engines.base import GenerateRequest, Generation
from dart_cli.env.router import RolloutRouter
from dart_cli.policy.loader import LoadedPolicy, load_policy, weight_tensors
from dart_cli.runtime.background import background
from dart_cli.train.publishing import make_channel
from dart_cli.weights.broadcast.channel import BroadcastChannel
from dart_cli.weights.manifest import KnownVersion, versions
from envs.contract.registry import load_suite, make_env
from scripts import tiny_model as tiny
from tests.engines.exact import Weights, replayed_logprobs

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 8
TOKENS = 60
SCORED = 40
"""Completions of several versions that are scored again."""
STOPPED_S = 13.0
"""A stopped process goes on after this long, which is more than a broadcast waits."""
SETTLE_S = 120.0
REQUEST_S = 120.0
MOST_WRONG = 20

CONFIG = """
[run]
dir = "{run}"
[model]
path = "{model}"
[env]
suite = "mini"
[rollout]
max_batch = 8
max_tokens = {tokens}
threads = 1
[weights]
channel = "{channel}"
[up]
rollouts = {workers}
"""


def main() -> int:
    """Run, kill, score and print; return 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--updates", type=int, default=200, help="versions to publish")
    parser.add_argument("--every", type=float, default=0.8, help="seconds between two versions")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kill-every", type=float, default=8.0, help="seconds between two kills")
    parser.add_argument("--channel", default="gloo", choices=("gloo", "nccl", "file"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beside", default="nothing", help="what else runs, for the record")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.trainer:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        asyncio.run(train(load_config(arguments.trainer, []), arguments.updates, arguments.every))
        return 0
    with tempfile.TemporaryDirectory(prefix="dart-soak-") as name:
        folder = Path(name)
        tiny.save(folder / "model", *tiny.build_tiny(seed=3), build={})  # no token is certain
        file = folder / "run.toml"
        values = {"run": folder / "run", "model": folder / "model", "tokens": TOKENS}
        text = CONFIG.format(**values, channel=arguments.channel, workers=arguments.workers)
        file.write_text(text, encoding="utf-8")
        try:
            result = asyncio.run(Soak(file, arguments).run())
        except DartError as error:
            parser.exit(error.exit_code, f"error: {error}\n")
    line = json.dumps(result)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)
    return int(any(result[name] for name in ("aborted", "wrong_spans", "hanging", "ended_alone")))


class WeightsByVersion(list[Weights]):
    """Weights by version, which are made when they are asked for: a random step from the first each."""

    def __init__(self, policy: LoadedPolicy) -> None:
        super().__init__()
        self._cache: dict[int, Weights] = {}  # a few, the newest last
        self._start = {name: t.clone() for name, t in weight_tensors(policy.model).items()}

    def __getitem__(self, version: int) -> Weights:  # type: ignore[override]
        if version not in self._cache:
            generator = torch.Generator().manual_seed(version)
            self._cache[version] = {
                name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) * (version > 0)
                for name, tensor in self._start.items()
            }
            for old in list(self._cache)[:-4]:
                del self._cache[old]
        return self._cache[version]


# --- the trainer's process --------------------------------------------------------------------


async def train(config: Config, last: int, every_s: float) -> None:
    """Publish the versions after those that are known, up to `last`; then answer until killed."""
    weights = WeightsByVersion(load_policy(config.model.path))
    endpoints, curve = run_endpoints(config), run_curve(config)
    channel = make_channel(config)
    async with contextlib.AsyncExitStack() as stack:
        data = await stack.enter_async_context(
            Requester(endpoints.address(DATA), name="train", peer="data", curve=curve)
        )
        if isinstance(channel, BroadcastChannel):
            address = endpoints.address(TRAIN)
            replier = await stack.enter_async_context(Replier(address, curve=curve))
            await stack.enter_async_context(background(replier.serve(channel.answer)))
        hello = TrainerHello(policy_version=-1, last_batch_id=0, updates=0)
        welcome = await data.request(hello, REQUEST_S)
        assert isinstance(welcome, HelloReply)
        versions_in_use = [welcome.policy_version, *versions(weights_dir(config))]
        at = (
            None
            if welcome.policy_version < 0
            else KnownVersion(welcome.policy_version, welcome.digest)
        )
        for version in range(max(versions_in_use) + 1, last + 1):
            began = time.monotonic()
            if version == max(versions_in_use) + 1:
                publication = await asyncio.to_thread(
                    channel.resume, weights[version], version, (), at
                )
            else:
                publication = await asyncio.to_thread(
                    lambda v: channel.begin(weights[v], v).result(), version
                )
            assert publication.policy_version == version
            await data.request(
                WeightsPublished(
                    policy_version=version,
                    path=str(publication.path),
                    digest=publication.digest,
                    updates=version,
                ),
                REQUEST_S,
            )
            await asyncio.sleep(max(0.0, began + every_s - time.monotonic()))
        await asyncio.sleep(1e6)


# --- the driver -------------------------------------------------------------------------------


@dataclass
class Soak:
    """One run of the soak test."""

    file: Path
    arguments: argparse.Namespace
    answers: list[tuple[ActRequest, Completion]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    ended_alone: list[str] = field(default_factory=list)
    serving: dict[str, int] = field(default_factory=dict)  # worker -> version
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _killed: set[int] = field(default_factory=set)
    _ending: bool = False

    async def run(self) -> dict[str, Any]:
        """Run the whole soak test."""
        config = load_config(self.file, [])
        config.run.dir.mkdir(mode=0o700)
        (config.run.dir / "logs").mkdir()
        names = [f"rollout-{index}" for index in range(self.arguments.workers)]
        router = RolloutRouter("soak", REQUEST_S)
        keeping: list[asyncio.Task[None]] = []
        try:
            keeping = [asyncio.create_task(self.keep(name)) for name in ("data", "train", *names)]
            states = Subscriber(run_endpoints(config).address(TELEMETRY_OUT), [Heartbeat])
            async with states, background(self.listen(states, router)):
                began = time.monotonic()
                await self.until(lambda: len(self.serving) == len(names), SETTLE_S)
                asking = [asyncio.create_task(self.ask(router, k)) for k in range(CLIENTS)]
                killing = asyncio.create_task(self.kill(names))
                await self.until(lambda: max(self.serving.values()) == self.arguments.updates, 3600)
                killing.cancel()
                self._continue_all()
                hanging = await self.until(
                    lambda: all(self.serving[n] == self.arguments.updates for n in names), SETTLE_S
                )
                seconds = time.monotonic() - began
                self._ending = True
                await asyncio.gather(*asking)
        finally:
            self._ending = True
            self._continue_all()
            for task in keeping:
                task.cancel()
            for process in self._processes.values():
                process.kill()
                process.wait()
            await router.close()
        syncs = self.syncs(config)
        return {
            "benchmark": "weights_soak",
            "channel": self.arguments.channel,
            "updates": self.arguments.updates,
            "workers": len(names),
            "requests": len(self.answers),
            "aborted": len(self.failed),
            "wrong_spans": len(self.wrong),
            "hanging": []
            if hanging
            else [n for n in names if self.serving[n] != self.arguments.updates],
            "ended_alone": self.ended_alone,
            "kills": dict(sorted(self.kills.items())),
            "rerouted": router.routed.rerouted,
            **self.score(config),
            **syncs,
            **rounds(config.run.dir / "logs" / "soak-train.log"),
            "seconds": round(seconds, 1),
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
            "beside": self.arguments.beside,
            "examples": [*self.failed, *self.wrong][:MOST_WRONG],
        }

    async def until(self, condition: Any, deadline_s: float) -> bool:
        """Return True if the condition becomes true in time."""
        deadline = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    async def keep(self, name: str) -> None:
        """Start a process again each time it ends, until the test ends."""
        command = [sys.executable, "-m", "dart_cli", name.partition("-")[0], str(self.file)]
        if name == "train":
            mine = ("updates", "every")
            options = [p for key in mine for p in (f"--{key}", str(getattr(self.arguments, key)))]
            command = [sys.executable, __file__, "--trainer", str(self.file), *options]
        elif name != "data":
            command += ["--worker", name]
        log = self.file.parent / "run" / "logs" / f"soak-{name}.log"
        while not self._ending:
            with log.open("ab") as output:
                process = subprocess.Popen(  # noqa: ASYNC220 - starting it blocks for a moment only
                    command, cwd=ROOT, stdout=output, stderr=output, stdin=subprocess.DEVNULL
                )
            self._processes[name] = process
            await asyncio.to_thread(process.wait)
            if not self._ending and process.pid not in self._killed:
                self.ended_alone.append(f"{name}: {process.returncode}")
                sys.stderr.write(log.read_text(encoding="utf-8", errors="replace")[-2000:])

    async def listen(self, states: Subscriber, router: RolloutRouter) -> None:
        """Note what each worker serves, until cancelled."""
        async for heartbeat in states:
            assert isinstance(heartbeat, Heartbeat)
            router.observe(heartbeat)
            if heartbeat.role == "rollout" and heartbeat.state in ("ready", "syncing"):
                self.serving[heartbeat.worker] = heartbeat.policy_version

    async def ask(self, router: RolloutRouter, client: int) -> None:
        """Send requests without pause."""
        env = make_env("mini")
        tasks = list(load_suite("mini").tasks.values())
        step = 0
        while not self._ending:
            task = tasks[(client + step) % len(tasks)]
            seed = CLIENTS * step + client
            observation, info = env.reset(seed=seed, options={"task": task})
            request = ActRequest(
                trajectory_id=f"t{client}-{step}",
                step=0,
                instruction=str(info.get("instruction", task.instruction)),
                turns=[],
                screenshot=observation.screenshot,
                width=observation.width,
                height=observation.height,
                sampling=Sampling(temperature=1.0, max_tokens=TOKENS, seed=seed),
            )
            try:
                completion = await router.act(request)
            except DartError as error:
                self.failed.append(f"{request.trajectory_id}: {error}")
            else:
                self.check(request, completion)
            router.forget(request.trajectory_id)
            step += 1
        env.close()

    def check(self, request: ActRequest, completion: Completion) -> None:
        """Store a whole completion with its request; note spans that cannot be right."""
        if completion.stop == "suspended":
            self.failed.append(f"{request.trajectory_id}: suspended")
            return
        spans, length = completion.sampled.version_spans, len(completion.sampled)
        edges = [0, *(edge for span in spans for edge in (span.start, span.end)), length]
        span_versions = [span.version for span in spans]
        if (
            edges[::2] != edges[1::2]
            or span_versions != sorted(set(span_versions))
            or not 0 <= span_versions[0] <= span_versions[-1] <= self.arguments.updates
        ):
            self.wrong.append(f"{request.trajectory_id}: {spans} of {length} tokens")
        self.answers.append((request, completion))

    async def kill(self, workers: list[str]) -> None:
        """Kill or stop the sides in turn, until cancelled."""
        choice = Random(self.arguments.seed)
        turns = (
            *(("rollout", signal.SIGKILL), ("rollout", signal.SIGSTOP)),
            *(("train", signal.SIGKILL), ("data", signal.SIGKILL)),
            *(("rollout", signal.SIGSTOP), ("train", signal.SIGSTOP)),
        )
        while True:
            for side, how in turns:
                await asyncio.sleep(self.arguments.kill_every * choice.uniform(0.5, 1.5))
                name = choice.choice(workers) if side == "rollout" else side
                process = self._processes[name]
                if process.poll() is not None:
                    continue
                self.kills[f"{signal.Signals(how).name} {side}"] += 1
                sys.stderr.write(f"v{max(self.serving.values())}: {how.name} {name}\n")
                if how == signal.SIGKILL:
                    self._killed.add(process.pid)
                process.send_signal(how)
                if how == signal.SIGSTOP:
                    await asyncio.sleep(STOPPED_S)
                    process.send_signal(signal.SIGCONT)

    def _continue_all(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)

    def score(self, config: Config) -> dict[str, object]:
        """Return the largest error of completions of several versions."""
        policy = load_policy(config.model.path)
        weights = WeightsByVersion(policy)
        mixed = [pair for pair in self.answers if len(pair[1].sampled.version_spans) > 1]
        scored = mixed[:: max(1, len(mixed) // SCORED)][:SCORED]
        worst = 0.0
        for request, completion in scored:
            replay = GenerateRequest(
                request_id=request.trajectory_id,
                prompt_token_ids=completion.prompt_token_ids,
                images=[request.screenshot],
                sampling=request.sampling,
            )
            generation = Generation(completion.sampled, completion.stop, 0.0, 0.0)
            replayed = torch.tensor(replayed_logprobs(policy, replay, generation, weights))
            behaviour = torch.tensor(completion.sampled.behaviour_logprobs)
            worst = max(worst, float((behaviour - replayed).abs().max()))
        return {
            "completions_of_several_versions": len(mixed),
            "scored": len(scored),
            "span_max_abs_diff": worst,
        }

    def syncs(self, config: Config) -> dict[str, object]:
        """Return what the workers reported to the data service of their rounds."""
        with open_reader(config.run.dir) as reader:
            rows = list(reader.syncs())
        successes = [row for row in rows if not row.error]
        errors = {row.error.replace(str(config.run.dir), "RUN")[:120] for row in rows if row.error}
        halts = sorted(1e3 * (row.pause_s) for row in successes)
        return {
            "syncs": len(successes),
            "refused": len(rows) - len(successes),
            "refusals": sorted(errors)[:MOST_WRONG],
            "pause_p50_ms": round(statistics.median(halts or [0.0]), 1),
            "pause_max_ms": round(max(halts, default=0.0), 1),
        }


def rounds(log: Path) -> dict[str, object]:
    """Return the broadcasts in the trainer's log, and how many workers took part in each."""
    text = log.read_text(encoding="utf-8", errors="replace")
    sizes = Counter(
        receivers.count(",") + 1 for receivers in re.findall(r"bytes to (.*) in ", text)
    )
    return {
        "broadcasts": dict(sorted(sizes.items())),
        "broken": len(re.findall(r"broke off|was not joined", text)),
    }


if __name__ == "__main__":
    sys.exit(main())
