"""The run of a rehearsal: the verbs as they are, as child processes, watched through what they store.

    Player      plays the parts one after the other; keeps what they proved, and what was left out
    Standing    how far the run is, by its database and the trainer's log
    PartError   a part failed: its place and the cure

`dart up` trains until the trainer has made an update, was killed and has resumed, and every rollout worker serves the
update's weights; then once more, if the time suffices. `dart export` writes these weights; the export is loaded and
scores stored steps as the published set does. `dart eval` plays a few episodes with the time that is left.
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

from bus.errors import DartError, RunDirectoryError, StoreError
from dart_cli.config.schema import Config
from dart_cli.config.values import short_value
from dart_cli.data.store.open import open_reader
from dart_cli.data.store.reader import Reader
from dart_cli.rehearsal.budget import (
    PASSES,
    PLANNED,
    Budget,
    Costs,
    Level,
    choose,
    levels,
)
from dart_cli.rehearsal.plan import Rehearsal
from dart_cli.rehearsal.stopping import LACK, end_descendants
from dart_cli.runtime.liveness import workers_of
from dart_cli.runtime.logs import log_dir
from dart_cli.runtime.supervisor import ChildError, Supervisor
from dart_cli.runtime.tables import clock
from dart_cli.suite_check.probes import PROBES, Probed, play_probe

WEIGHTS = "the first weights"
EPISODE = "an episode to its end"
UPDATE = "an update"
PUBLICATION = "its weights in every rollout worker"
RESUME = "kill and resume of the trainer"
EXPORT = "export"
COMPARED = "the export's log-probabilities"
ALWAYS = (EPISODE, UPDATE, PUBLICATION, RESUME, EXPORT, COMPARED)
"""What no lack of time leaves out as long as there is any."""
SECOND = "a second update, after the resume"
EVALUATION = "evaluation"
VERDICTS = "verdicts of the suite's own solution"
OPTIONAL = (SECOND, EVALUATION, VERDICTS)
"""What is left out for lack of time, first to last."""

VERDICTS_SHARE = 0.2
"""Share of the time that the verdicts may take."""
LOOK_S = 0.5
"""Seconds between two looks into the run's database."""
SAY_S = 15.0
"""Seconds after which the time left is said again, if nothing has changed."""
ENDING_S = 10.0
"""Seconds that the run has for an end in order; then it is killed."""
PROBED = 2
"""Tasks whose verdicts are tried, beside those of the run."""


class PartError(DartError):
    """A part of the rehearsal failed; the message has the place and the cure."""


@dataclass(frozen=True)
class Standing:
    """How far the run is."""

    episodes: int
    updates: int
    versions: int
    serving: tuple[int, int]  # rollout workers with weights of one update or more, and of two
    loads: int  # how often a trainer was loaded

    @classmethod
    def of(cls, config: Config) -> Standing | None:
        """Return how far the run of `config` is; None as long as its processes start."""
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

    def is_news_after(self, last: Standing | None) -> bool:
        """Return whether more has changed than the number of episodes."""
        if last is None or bool(last.episodes) != bool(self.episodes):
            return True
        return replace(last, episodes=self.episodes) != self


def _serving(reader: Reader, updates: int) -> int:
    """Return how many rollout workers have taken weights of at least so many updates."""
    wanted = {each.policy_version for each in reader.versions() if each.updates >= updates}
    return len({s.worker for s in reader.syncs() if s.policy_version in wanted and not s.error})


def _loads(log: Path) -> int:
    """Return how often a trainer was loaded, by its log."""
    from dart_cli.train.loop import LOADED

    try:
        return log.read_text(encoding="utf-8", errors="replace").count(LOADED)
    except OSError:
        return 0


class Player:
    """Plays a rehearsal."""

    def __init__(self, plan: Rehearsal, budget: Budget) -> None:
        self.plan = plan
        self.budget = budget
        self.config: Config = plan.config
        self.log = plan.folder / "rehearsal.log"
        self.planned_s = budget.spent_s  # until the plan was made
        self.chosen = ""  # what is left out of the run, and why
        self.proved: dict[str, float] = {}  # part -> seconds since the rehearsal began
        self.left_out: dict[str, str] = {}  # part -> why it was not played
        self.probed: list[Probed] = []
        self.difference: float | None = None  # nats, of the export's log-probabilities, the largest
        self.compared = 0  # tokens

    def say(self, text: str) -> None:
        """Write a line of progress."""
        sys.stderr.write(f"{clock()} [{self.budget}] {text}\n")
        sys.stderr.flush()

    def parts(self) -> Mapping[str, Callable[[], None]]:
        """Return what is played, in order; each part raises a DartError where it fails."""
        return {
            "verdicts": self.probe,
            "sizes": self.fit,
            "run": lambda: asyncio.run(self._train()),
            "export": self._export,
            "export's log-probabilities": self._compare,
            "evaluation": self._evaluate,
        }

    def _prove(self, *parts: str) -> None:
        for part in parts:
            self.proved.setdefault(part, self.budget.spent_s)

    # --- before the run ---------------------------------------------------------------------

    def probe(self) -> None:
        """Play the suite's own solution, and episodes without one, for the verdicts that they get."""
        from dart_cli.config.task_split import training_tasks
        from dart_cli.player.episodes import in_slots

        written = self.plan.written
        tasks = [task for task in training_tasks(written) if task.feasible][:PROBED]
        left = [
            (task, each)
            for task in tasks
            for each in PROBES
            if each in ("done", "random", "oracle")
        ]

        async def work(env) -> None:  # type: ignore[no-untyped-def]  # AsyncEnv
            while left:
                task, each = left.pop(0)
                self.probed.append(await play_probe(env, task, written.env.seeds[0], each))

        async def play() -> None:
            async with asyncio.timeout(self.budget.left_s * VERDICTS_SHARE):
                await in_slots(written.env, "rehearsal", 1, work)

        try:
            asyncio.run(play())
        except TimeoutError:
            self.left_out[VERDICTS] = f"{LACK}: {len(self.probed)} episodes were over"
            if not self.probed:
                self.left_out[VERDICTS] += "; `dart env check` shows what the environment waits for"
        else:
            self._prove(VERDICTS)
        broken = [each for each in self.probed if each.outcome == "invalid"]
        if self.probed and len(broken) == len(self.probed):
            raise PartError(f"{broken[0].reason}; fix the environment: `dart env check`")

    def fit(self) -> None:
        """Choose how much of the run is played, by what a pass, an episode and a process take here."""
        config, left_s, episode_s = self.config, self.budget.left_s, self._episode_s()
        pass_s = self._passes(PLANNED * left_s / PASSES)
        start_s = self.planned_s + left_s - self.budget.left_s  # torch and the model are loaded
        costs = Costs(start_s, episode_s, pass_s, len(os.sched_getaffinity(0)))
        steps = levels(config, self.plan.screen)
        level = choose(steps, partial(costs.of, config), PLANNED * left_s)
        self.plan.reduce(level.values, LACK)
        self.config = self.plan.config
        (width, height), whole_s = level.screen, costs.of(config, level)
        reduced = [f"{key} = {short_value(value)}" for key, value in level.values.items()]
        self.chosen = (
            f"a pass over the longest prompt, of {level.images} screens of {width}x{height}, takes "
            f"{pass_s(level):.1f} s here, and a process {start_s:.0f} s to start: so the run takes about "
            f"{whole_s:.0f} s, and {left_s:.0f} s were left; reduced for it: {', '.join(reduced) or 'nothing'}"
        )
        self.say(self.chosen)

    def _passes(self, most_s: float) -> Callable[[Level], float]:
        """Return what measures a pass, up to `most_s` seconds; without a model there is none."""
        from dart_cli.policy.loader import load_policy  # late: they load torch
        from dart_cli.rehearsal.forward_time import Passes

        if not self.plan.has_model:
            return lambda _: 0.0
        model, pointing = self.config.model, self.config.policy.pointing
        policy = load_policy(model.path, model.dtype, pointing=pointing)
        return Passes(policy, most_s)

    def _episode_s(self) -> float:
        """Return the seconds of an episode without a model."""
        verdicts = self.budget.spent_s - self.planned_s
        return verdicts / len(self.probed) if self.probed else 0.0

    # --- training ---------------------------------------------------------------------------

    async def _train(self) -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(self._supervised({"up": ["up", *self.plan.arguments]}, stop))
        following = asyncio.create_task(self._follow())
        try:
            await asyncio.wait({running, following}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                await running  # raises why it ended
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
        """Return once all is proved that the time suffices for; the trainer is killed after its first update."""
        killed, began, said_at = False, self.budget.spent_s, 0.0
        last: Standing | None = None
        self.say("the processes start")
        while True:
            await asyncio.sleep(LOOK_S)
            now = Standing.of(self.config)
            if now is None:
                continue
            if now.is_news_after(last) or self.budget.spent_s - said_at > SAY_S:
                self.say(self._in_words(now))
                said_at, last = self.budget.spent_s, now
            self.note(now, killed=killed)
            if now.updates and not killed and self._has_checkpoint():
                self.say("the first update is done; the trainer is killed, to see it resume")
                killed = self._kill_trainer()
            if RESUME in self.proved and PUBLICATION in self.proved:
                if SECOND in self.proved:
                    self._kill_trainer()  # it would finish its third update first
                    return
                if not self.goes_on(began):
                    self.left_out[SECOND] = LACK
                    self.say(f"not played: {SECOND}, {LACK}")
                    return

    def note(self, now: Standing, *, killed: bool) -> None:
        """Note what the run has proved by now."""
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
        """Return whether a second update fits, beside what follows the run; `began` is when its processes started.

        It takes as long as the first one, from the first weights on. Export and evaluation start a process each, and the
        export is compared.
        """
        proved = self.proved
        start_s, update_s = proved[WEIGHTS] - began, proved[UPDATE] - proved[WEIGHTS]
        worked_s = self.budget.spent_s - max(proved[RESUME], proved[PUBLICATION])
        return self.budget.left_s > max(0.0, update_s - worked_s) + 3 * start_s + ENDING_S

    def _has_checkpoint(self) -> bool:
        return any((self.config.run.dir / "checkpoints").glob("c[0-9]*"))

    def _kill_trainer(self) -> bool:
        """Kill the trainer; return whether one lived."""
        for worker in workers_of(self.config.run.dir):
            if worker.name == "train" and worker.liveness != "gone":
                os.kill(worker.pid, signal.SIGKILL)
                return True
        return False

    def _in_words(self, now: Standing) -> str:
        served = f"{now.serving[0]} of {self.config.up.rollouts} rollout workers serve an update's weights"
        return f"{now.episodes} episodes, {now.updates} updates, {now.versions} versions, {served}"

    # --- its end ----------------------------------------------------------------------------

    @property
    def exported(self) -> Path:
        """The folder that `dart export` writes."""
        return self.plan.folder / "exported"

    def _export(self) -> None:
        merged = ["--merged"] if self.config.model.lora else []
        path, *rest = self.plan.arguments
        self._run_verb("export", ["export", path, str(self.exported), *rest, *merged])
        self._prove(EXPORT)

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
        self._prove(COMPARED)

    def _evaluate(self) -> None:
        command = ["eval", *self.plan.arguments, "--mode", "sampled", "--keep-as", "rehearsal"]
        self._run_verb("evaluation", command)
        self._prove(EVALUATION)

    def _run_verb(self, name: str, command: Sequence[str]) -> None:
        asyncio.run(self._supervised({name: command}, asyncio.Event()))

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
