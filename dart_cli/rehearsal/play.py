"""The run of a rehearsal: the verbs as they are, as child processes, watched through what they store.

    Player      plays the parts one after the other and keeps what went wrong
    PartError   a part failed: its place and the cure

`dart up` trains until the trainer, killed once and resumed, has made two updates and every rollout worker serves
them; `dart eval` plays a few episodes with these weights; `dart export` writes them; the export is loaded and
scores stored steps as the published set does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bus.errors import DartError, RunDirectoryError, StoreError
from dart_cli.config.schema import Config
from dart_cli.data.store.open import open_reader
from dart_cli.data.store.reader import Reader
from dart_cli.rehearsal.plan import Rehearsal
from dart_cli.runtime.liveness import workers_of
from dart_cli.runtime.supervisor import ChildError, Supervisor
from dart_cli.runtime.tables import clock
from dart_cli.suite_check.probes import PROBES, Probed, play_task

UPDATES = 2
RUN_S, EVAL_S, EXPORT_S, PROBE_S = 900.0, 600.0, 300.0, 300.0
"""Seconds that a part may take."""
LOOK_S = 0.5
"""Seconds between two looks into the run's database."""
PROBED = 2
"""Tasks whose verdicts are tried, beside those of the run."""


class PartError(DartError):
    """A part of the rehearsal failed; the message has the place and the cure."""


class Player:
    """Plays a rehearsal."""

    def __init__(self, plan: Rehearsal) -> None:
        self.plan = plan
        self.config: Config = plan.config
        self.log = plan.folder / "rehearsal.log"
        self.probed: list[Probed] = []
        self.difference: float | None = None  # nats, of the export's log-probabilities, the largest
        self.compared = 0  # tokens

    def say(self, text: str) -> None:
        """A line of progress."""
        sys.stderr.write(f"{clock()} {text}\n")
        sys.stderr.flush()

    def parts(self) -> Mapping[str, Callable[[], None]]:
        """What is played, in order; each raises a DartError where it fails."""
        return {
            "verdicts": self.probe,
            "run": lambda: asyncio.run(self._train()),
            "evaluation": self._evaluate,
            "export": self._export,
            "export's log-probabilities": self._compare,
        }

    def probe(self) -> None:
        """Play the suite's own solution, and episodes without one, for the verdicts that they get."""
        from dart_cli.config.task_split import training_tasks
        from dart_cli.player.episodes import in_slots

        written = self.plan.written
        tasks = [task for task in training_tasks(written) if task.feasible][:PROBED]
        probes = [each for each in PROBES if each in ("done", "random", "oracle")]
        left = iter(tasks)

        async def work(env) -> None:  # type: ignore[no-untyped-def]  # AsyncEnv
            for task in left:
                self.probed += await play_task(env, task, [written.env.seeds[0]], probes)

        async def play() -> None:
            async with asyncio.timeout(PROBE_S):
                await in_slots(written.env, "rehearsal", 1, work)

        try:
            asyncio.run(play())
        except TimeoutError:
            raise PartError(
                f"{len(tasks)} tasks were not played in {PROBE_S:.0f} s; lower env.step_deadline_s"
            ) from None
        broken = [each for each in self.probed if each.outcome == "invalid"]
        if self.probed and len(broken) == len(self.probed):
            raise PartError(f"{broken[0].reason}; fix the environment: `dart env check`")

    # --- training ---------------------------------------------------------------------------

    async def _train(self) -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(self._supervised({"up": ["up", *self.plan.arguments]}, stop))
        following = asyncio.create_task(self._follow())
        try:
            async with asyncio.timeout(RUN_S):
                await asyncio.wait({running, following}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    await running  # raises why it ended
                    raise PartError(f"`dart up` ended before {UPDATES} updates; see {self.log}")
                await following
        except TimeoutError:
            raise PartError(
                f"{self._where()} after {RUN_S:.0f} s; see {self.config.run.dir}/logs and `dart status "
                f"{self.config.run.dir}`"
            ) from None
        finally:
            following.cancel()
            stop.set()
            await asyncio.gather(running, return_exceptions=True)

    async def _follow(self) -> None:
        """Return once the second update serves everywhere; the trainer is killed after the first."""
        told, killed = "", 0
        while True:
            await asyncio.sleep(LOOK_S)
            if told != (told := self._where()):
                self.say(told)
            try:
                with open_reader(self.config.run.dir) as reader:
                    trained = self._trained(reader)
                    serving = self._serving(reader)
            except (RunDirectoryError, StoreError):
                continue  # it starts
            if trained and not killed and self._has_checkpoint():
                self.say("the first update is done; the trainer is killed, to see it resume")
                killed = self._kill_trainer()
            if trained >= UPDATES and serving == self.config.up.rollouts and killed:
                self._kill_trainer()  # it would finish its third update first
                return

    def _has_checkpoint(self) -> bool:
        return any((self.config.run.dir / "checkpoints").glob("c[0-9]*"))

    def _kill_trainer(self) -> int:
        """Its process, 0 where none lives."""
        for worker in workers_of(self.config.run.dir):
            if worker.name == "train" and worker.liveness != "gone":
                os.kill(worker.pid, signal.SIGKILL)
                return worker.pid
        return 0

    def _trained(self, reader: Reader) -> int:
        return sum(batch.state == "trained" for batch in reader.batches())

    def _serving(self, reader: Reader) -> int:
        """Workers that have taken weights of the second update."""
        second = {each.policy_version for each in reader.versions() if each.updates >= UPDATES}
        return len({s.worker for s in reader.syncs() if s.policy_version in second and not s.error})

    def _where(self) -> str:
        try:
            with open_reader(self.config.run.dir) as reader:
                return (
                    f"{reader.trajectories_over()} episodes, {self._trained(reader)} of {UPDATES} updates, "
                    f"{len(reader.versions())} versions, {self._serving(reader)} of "
                    f"{self.config.up.rollouts} rollout workers serve the second"
                )
        except (RunDirectoryError, StoreError):
            return "the processes start"

    # --- its end ----------------------------------------------------------------------------

    def _evaluate(self) -> None:
        command = ["eval", *self.plan.arguments, "--mode", "sampled", "--keep-as", "rehearsal"]
        self._run_verb("evaluation", command, EVAL_S)

    @property
    def exported(self) -> Path:
        """The folder that `dart export` writes."""
        return self.plan.folder / "exported"

    def _export(self) -> None:
        merged = ["--merged"] if self.config.model.lora else []
        path, *rest = self.plan.arguments
        self._run_verb("export", ["export", path, str(self.exported), *rest, *merged], EXPORT_S)

    def _compare(self) -> None:
        """Score stored steps with the export and with the published set."""
        from dart_cli.rehearsal.exported import compare

        found = compare(self.config, self.exported)
        self.difference, self.compared = found.largest, found.tokens
        if not found.mean <= found.limit:
            raise PartError(
                f"{self.exported} scores stored steps otherwise than the published weights: "
                f"{found.mean:.2e} nats on average, of {found.tokens} tokens, more than {found.limit:g}"
            )

    def _run_verb(self, name: str, command: Sequence[str], seconds: float) -> None:
        async def run() -> None:
            async with asyncio.timeout(seconds):
                await self._supervised({name: command}, asyncio.Event())

        try:
            asyncio.run(run())
        except TimeoutError:
            raise PartError(f"not over after {seconds:.0f} s; see {self.log}") from None

    async def _supervised(self, commands: Mapping[str, Sequence[str]], stop: asyncio.Event) -> None:
        def notice(line: str) -> None:
            if "progress:" not in line:
                self.say(line)

        supervisor = Supervisor(
            commands, leaders=list(commands), restarts=0, log_file=self.log, notice=notice
        )
        try:
            await supervisor.run(stop)
        except ChildError as error:
            raise PartError(str(error)) from None
