"""Play the parts of a smoke test: `dart` commands as child processes, watched through what they store.

    Player        plays the parts in order, and notes what each proved and what was left out
    RunProgress   how far the run is, read from its database and the trainer's log
    PartError     a part failed; the message has the place and the fix

`dart up` trains until the trainer has made an update, was killed and has resumed, and every rollout worker
serves the update's weights. If there is time, it makes a second update. `dart export` then writes the
weights. The export is loaded, and must score stored steps like the published set. `dart eval` plays a few
episodes in the remaining time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bus.errors import DartError, RunDirectoryError, StoreError
from dart_cli.config.schema import Config
from dart_cli.config.values import short_value
from dart_cli.data.store.open import open_reader
from dart_cli.data.store.reader import Reader
from dart_cli.runtime.liveness import workers_of
from dart_cli.runtime.logs import log_dir
from dart_cli.runtime.supervisor import ChildError, Supervisor
from dart_cli.runtime.tables import clock
from dart_cli.smoke_test.config_changes import SmokeTestPlan
from dart_cli.smoke_test.interruption import LACK_OF_TIME, end_descendants
from dart_cli.smoke_test.time_budget import (
    PASSES,
    PLANNED,
    Costs,
    RunSize,
    TimeBudget,
    choose_size,
    run_sizes,
)
from dart_cli.suite_check.probes import PROBES, ProbeEpisode, play_probe

if TYPE_CHECKING:
    from dart_cli.smoke_test.export_check import LogprobDifferences  # it loads torch

WEIGHTS = "the first weights"
EPISODE = "an episode to its end"
UPDATE = "an update"
PUBLICATION = "its weights in every rollout worker"
RESUME = "kill and resume of the trainer"
EXPORT = "export"
EXPORT_COMPARISON = "the export's log-probabilities"
ALWAYS = (EPISODE, UPDATE, PUBLICATION, RESUME, EXPORT, EXPORT_COMPARISON)
"""Parts that are always played: if the time ends before them, the smoke test has failed."""
SECOND = "a second update, after the resume"
EVALUATION = "evaluation"
VERDICTS = "verdicts of the suite's own solution"
OPTIONAL = (SECOND, EVALUATION, VERDICTS)
"""Parts that are left out for lack of time, the first one first."""

VERDICTS_SHARE = 0.2
"""Share of the remaining time in which the suite's own solution is played."""
LOOK_S = 0.5
"""Seconds between two reads of the run's database."""
SAY_S = 15.0
"""Seconds after which a line of progress is printed even if nothing has changed."""
ENDING_S = 10.0
"""Seconds in which the run may end in order; then it is killed."""
PROBED = 2
"""Tasks that are played without a model before the run, for their verdicts."""


class PartError(DartError):
    """A part of the smoke test failed; the message has the place and the fix."""


@dataclass(frozen=True)
class RunProgress:
    """How far the run is."""

    episodes: int
    updates: int
    versions: int
    serving: tuple[int, int]  # rollout workers with weights of 1 update or more, of 2 or more
    loads: int  # how often the trainer has loaded its model

    @classmethod
    def of(cls, config: Config) -> RunProgress | None:
        """Return how far the run of `config` is; None while its processes are starting."""
        try:
            with open_reader(config.run.dir) as reader:
                return cls(
                    reader.trajectories_over(),
                    sum(batch.state == "trained" for batch in reader.batches()),
                    len(reader.versions()),
                    (_serving(reader, 1), _serving(reader, 2)),
                    _loads(log_dir(config.run.dir) / "train.log"),
                )
        except (RunDirectoryError, StoreError):
            return None

    def is_news_after(self, last: RunProgress | None) -> bool:
        """Return True if more than the number of episodes has changed, or the first episode has ended."""
        if last is None or bool(last.episodes) != bool(self.episodes):
            return True
        return replace(last, episodes=self.episodes) != self


def _serving(reader: Reader, updates: int) -> int:
    """Return how many rollout workers have loaded weights of at least so many updates."""
    enough = {row.policy_version for row in reader.versions() if row.updates >= updates}
    return len(
        {sync.worker for sync in reader.syncs() if sync.policy_version in enough and not sync.error}
    )


def _loads(log: Path) -> int:
    """Count in its log how often the trainer has loaded its model."""
    from dart_cli.train.loop import LOADED

    try:
        return log.read_text(encoding="utf-8", errors="replace").count(LOADED)
    except OSError:
        return 0


class Player:
    """Plays the parts of one smoke test, and holds their results."""

    def __init__(self, plan: SmokeTestPlan, budget: TimeBudget) -> None:
        self.plan = plan
        self.budget = budget
        self.config: Config = plan.config
        self.log = plan.folder / "smoke-test.log"
        self.planned_s = budget.spent_s  # seconds until the plan was made
        self.size_note = ""  # one line: what was measured, and what is reduced because of it
        self.proved: dict[str, float] = {}  # part -> seconds since the smoke test began
        self.left_out: dict[str, str] = {}  # part -> why it was not played
        self.probes: list[ProbeEpisode] = []
        self.differences: LogprobDifferences | None = None  # between export and published set

    def say(self, text: str) -> None:
        """Write a line of progress."""
        sys.stderr.write(f"{clock()} [{self.budget}] {text}\n")
        sys.stderr.flush()

    def parts(self) -> Mapping[str, Callable[[], None]]:
        """Return the parts by name, in order.

        Each is a function that raises a DartError if the part fails.
        """
        return {
            "verdicts": self.probe,
            "sizes": self.fit,
            "run": lambda: asyncio.run(self._train()),
            "export": self._export,
            "export's log-probabilities": self._compare,
            "evaluation": self._evaluate,
        }

    def _prove(self, *parts: str) -> None:
        """Note that parts are proved, with the time at which they first were."""
        for part in parts:
            self.proved.setdefault(part, self.budget.spent_s)

    # --- before the run ---------------------------------------------------------------------

    def probe(self) -> None:
        """Play the suite's own solution and some agents without a model, for the verdicts that they get."""
        from dart_cli.config.task_split import training_tasks
        from dart_cli.player.episodes import in_slots

        original = self.plan.original
        tasks = [task for task in training_tasks(original) if task.feasible][:PROBED]
        waiting = [
            (task, probe)
            for task in tasks
            for probe in PROBES
            if probe in ("done", "random", "oracle")
        ]

        async def work(env) -> None:  # type: ignore[no-untyped-def]  # AsyncEnv
            while waiting:
                task, probe = waiting.pop(0)
                self.probes.append(await play_probe(env, task, original.env.seeds[0], probe))

        async def play() -> None:
            async with asyncio.timeout(self.budget.left_s * VERDICTS_SHARE):
                await in_slots(original.env, "smoke-test", 1, work)

        try:
            asyncio.run(play())
        except TimeoutError:
            self.left_out[VERDICTS] = f"{LACK_OF_TIME}: {len(self.probes)} episodes were over"
            if not self.probes:
                self.left_out[VERDICTS] += "; `dart env check` shows what the environment waits for"
        else:
            self._prove(VERDICTS)
        broken = [probe for probe in self.probes if probe.outcome == "invalid"]
        if self.probes and len(broken) == len(self.probes):
            raise PartError(f"{broken[0].reason}; fix the environment: `dart env check`")

    def fit(self) -> None:
        """Choose the size of the run by the time that a pass, an episode and a start take here."""
        config, left_s, episode_s = self.config, self.budget.left_s, self._episode_s()
        pass_s = self._passes(PLANNED * left_s / PASSES)
        # By now torch and the model are loaded, as in any process of the run.
        start_s = self.planned_s + left_s - self.budget.left_s
        costs = Costs(start_s, episode_s, pass_s, len(os.sched_getaffinity(0)))
        sizes = run_sizes(config, self.plan.screen)
        size = choose_size(sizes, partial(costs.seconds_of, config), PLANNED * left_s)
        self.plan.reduce(size.values, LACK_OF_TIME)
        self.config = self.plan.config
        (width, height), whole_s = size.screen, costs.seconds_of(config, size)
        reduced = [f"{key} = {short_value(value)}" for key, value in size.values.items()]
        self.size_note = (
            f"a pass over the longest prompt, of {size.images} screens of {width}x{height}, takes "
            f"{pass_s(size):.1f} s here, and a process {start_s:.0f} s to start, so the run takes about "
            f"{whole_s:.0f} s of the remaining {left_s:.0f} s; reduced for this: {', '.join(reduced) or 'nothing'}"
        )
        self.say(self.size_note)

    def _passes(self, most_s: float) -> Callable[[RunSize], float]:
        """Return a function that measures a pass of up to `most_s` seconds; 0 for a run without a model."""
        from dart_cli.policy.loader import load_policy  # late: they load torch
        from dart_cli.smoke_test.pass_timer import PassTimer

        if not self.plan.has_model:
            return lambda _: 0.0
        model, pointing = self.config.model, self.config.policy.pointing
        policy = load_policy(model.path, model.dtype, pointing=pointing)
        return PassTimer(policy, most_s)

    def _episode_s(self) -> float:
        """Return the mean seconds of an episode without a model; 0 if none was played."""
        verdicts = self.budget.spent_s - self.planned_s
        return verdicts / len(self.probes) if self.probes else 0.0

    # --- training ---------------------------------------------------------------------------

    async def _train(self) -> None:
        """Run `dart up` until `_follow` returns. Raises PartError if it ends before."""
        stop = asyncio.Event()
        running = asyncio.create_task(self._supervised({"up": ["up", *self.plan.arguments]}, stop))
        following = asyncio.create_task(self._follow())
        try:
            await asyncio.wait({running, following}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                await running  # raises the error if there was one
                raise PartError(f"`dart up` ended before the trainer had resumed; see {self.log}")
            await following
        finally:
            following.cancel()
            stop.set()
            await asyncio.wait({running}, timeout=ENDING_S)
            if not running.done():
                end_descendants()
            await asyncio.gather(running, following, return_exceptions=True)

    async def _follow(self) -> None:
        """Watch the run, kill the trainer after its first update, and return when no more fits the time."""
        killed, began, printed_at = False, self.budget.spent_s, 0.0
        last: RunProgress | None = None
        self.say("the processes start")
        while True:
            await asyncio.sleep(LOOK_S)
            now = RunProgress.of(self.config)
            if now is None:
                continue
            if now.is_news_after(last) or self.budget.spent_s - printed_at > SAY_S:
                self.say(self._in_words(now))
                printed_at, last = self.budget.spent_s, now
            self.note(now, killed=killed)
            if now.updates and not killed and self._has_checkpoint():
                self.say("the first update is done; the trainer is killed, and must resume")
                killed = self._kill_trainer()
            if RESUME in self.proved and PUBLICATION in self.proved:
                if SECOND in self.proved:
                    self._kill_trainer()  # else it would finish a third update before it ends
                    return
                if not self.goes_on(began):
                    self.left_out[SECOND] = LACK_OF_TIME
                    self.say(f"not played: {SECOND}, {LACK_OF_TIME}")
                    return

    def note(self, now: RunProgress, *, killed: bool) -> None:
        """Note which parts are proved now; `killed` says whether the trainer was killed."""
        workers = self.config.up.rollouts
        proofs = {
            WEIGHTS: now.versions > 0,
            EPISODE: now.episodes > 0,
            UPDATE: now.updates > 0,
            PUBLICATION: now.serving[0] == workers,
            RESUME: killed and now.loads > 1,
            SECOND: killed and now.updates > 1 and now.serving[1] == workers,
        }
        self._prove(*(part for part, is_proved in proofs.items() if is_proved))
        if SECOND in self.proved:
            self._prove(RESUME)

    def goes_on(self, began: float) -> bool:
        """Return True if there is time for a second update and for the parts after the run.

        `began` is when the processes of the run started, in seconds of the budget. The second update takes as
        long as the first one did, counted from the first weights. Export, its comparison and evaluation start
        a process each.
        """
        proved = self.proved
        start_s, update_s = proved[WEIGHTS] - began, proved[UPDATE] - proved[WEIGHTS]
        worked_s = self.budget.spent_s - max(proved[RESUME], proved[PUBLICATION])
        return self.budget.left_s > max(0.0, update_s - worked_s) + 3 * start_s + ENDING_S

    def _has_checkpoint(self) -> bool:
        """Return True if the run has a checkpoint."""
        return any((self.config.run.dir / "checkpoints").glob("c[0-9]*"))

    def _kill_trainer(self) -> bool:
        """Kill the trainer, and return whether it was running."""
        for worker in workers_of(self.config.run.dir):
            if worker.name == "train" and worker.liveness != "gone":
                os.kill(worker.pid, signal.SIGKILL)
                return True
        return False

    def _in_words(self, now: RunProgress) -> str:
        """Return the line of progress for this state of the run."""
        served = f"{now.serving[0]} of {self.config.up.rollouts} rollout workers serve an update's weights"
        return f"{now.episodes} episodes, {now.updates} updates, {now.versions} versions, {served}"

    # --- after the run ----------------------------------------------------------------------------

    @property
    def exported(self) -> Path:
        """The folder to which `dart export` writes."""
        return self.plan.folder / "exported"

    def _export(self) -> None:
        """Export the run's newest weights. Raises PartError if `dart export` fails."""
        merged = ["--merged"] if self.config.model.lora else []
        path, *rest = self.plan.arguments
        self._run_command("export", ["export", path, str(self.exported), *rest, *merged])
        self._prove(EXPORT)

    def _compare(self) -> None:
        """Compare the scores of the export and of the published set.

        Raises PartError if they differ too much.
        """
        from dart_cli.smoke_test.export_check import compare_export

        differences = self.differences = compare_export(self.config, self.exported)
        if not differences.mean <= differences.limit:
            raise PartError(
                f"{self.exported} scores stored steps differently from the published weights: by "
                f"{differences.mean:.2e} nats on average over {differences.tokens} tokens, the limit is "
                f"{differences.limit:g}"
            )
        self._prove(EXPORT_COMPARISON)

    def _evaluate(self) -> None:
        """Play a few episodes with `dart eval`. Raises PartError if it fails."""
        command = ["eval", *self.plan.arguments, "--mode", "sampled", "--keep-as", "smoke-test"]
        self._run_command("evaluation", command)
        self._prove(EVALUATION)

    def _run_command(self, name: str, command: Sequence[str]) -> None:
        """Run one command of `dart` to its end. Raises PartError if it fails."""
        asyncio.run(self._supervised({name: command}, asyncio.Event()))

    async def _supervised(self, commands: Mapping[str, Sequence[str]], stop: asyncio.Event) -> None:
        """Run commands until they end or `stop` is set. Raises PartError if one fails."""

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
