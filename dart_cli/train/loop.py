"""The life of the trainer: batches in, new weights out.

    Trainer.run        from the start of its process (process.py) to the end
    Trainer._begin     load the model or the last checkpoint, send TrainerHello, publish its weights
    Trainer._train     take a batch, update, checkpoint, publish, acknowledge; repeat
    Trainer._step      one update, with its checkpoint and publication where due
    HeartbeatSender    a heartbeat each second, while torch works in a thread of its own
    DataClient         asks data and tells it (data_client.py)
    Publications       what is published beside the updates (publishing.py)

Each second of the process is counted as one of `seconds.starting`, `waiting` (for a batch, or for
data to accept a message), `training` (the update) and `publishing` (it stands still for weights or
checkpoints; most of both is done beside what follows).

The order of an update, and what a crash after each step costs:

    update        nothing: the batch is not acknowledged, data serves it again
    checkpoint    it is begun here and written beside what follows (checkpoints/checkpoint.py). Until it
                  is complete, the one before counts, and a crash costs what the last line says; then
                  TrainerHello says that the batch is in it, and data marks it trained
    publish       it is begun here, and complete beside what follows. Until it is announced, data knows
                  the version before; the number is taken by no other weights that were announced
    acknowledge   with the number of the version on its way, so data counts staleness from it, and
                  lets nothing be sampled that would be too old when it is trained on. Batches
                  after the last complete checkpoint are trained again from it: TrainerHello names
                  its last batch, data serves the later ones again, in order
    announce      workers hold weights that no checkpoint holds: the resumed trainer publishes its
                  own under the next number (FileChannel.resume), so versions never decrease, and
                  what they sampled is as old as it would have been (dart_cli/data/versions.py)

A version is announced before the next one begins. The last one is announced before its update is
acknowledged, since data ends the run with that.

A trainer that is asked to end, or hears that the run is over, finishes the update that is under way, publishes all
that it has learned, acknowledges, and writes its last checkpoint, all within LAST_WORK_S of dart_cli/runtime/role.py.
The data service waits for it (dart_cli/data/run_end.py). So what it did is counted everywhere. Where the trainer is
killed meanwhile, or takes longer, what it has not announced is counted nowhere.

So each batch is in the weights exactly once, relative to the checkpoint they descend from.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from bus.errors import CheckpointError, ConfigError, DartError, ParityError
from bus.heartbeat import HeartbeatSender, Load
from bus.messages import (
    REPLAY_METRIC,
    Batch,
    BatchReply,
    BatchRequest,
    BatchTrained,
    HelloReply,
    TrainerHello,
)
from bus.pubsub import Publisher
from bus.requests import Requester
from dart_cli.config import endpoints
from dart_cli.config.devices import make_own
from dart_cli.config.schema import Config
from dart_cli.runtime.background import StopRequested, background, unless_stopped
from dart_cli.runtime.joining import WHAT as JOINING
from dart_cli.runtime.role import LAST_WORK_S, finishing
from dart_cli.runtime.tables import fraction
from dart_cli.runtime.waits import PhaseTimer, as_gauges
from dart_cli.train.base import Learner, Update, batch_metrics, named_metrics, read_all
from dart_cli.train.checkpoints.checkpoint import CheckpointSaver, load_newest
from dart_cli.train.checkpoints.identity import TrainedPart, TrainerProgress
from dart_cli.train.data_client import DataClient
from dart_cli.train.metric_writer import MetricWriter
from dart_cli.train.publishing import Publications, make_channel
from dart_cli.train.ranks.processes import Ranks
from dart_cli.train.ranks.watch import is_ranked
from dart_cli.weights.file import Publication
from dart_cli.weights.folder import model_identity
from dart_cli.weights.manifest import KnownVersion, Published

if TYPE_CHECKING:
    from dart_cli.train.ranks.lead import RankedLearner

log = logging.getLogger(__name__)

MOST_SKIPPED = 20
"""Updates skipped in a row after which the run ends with an error."""
LOADED = "is loaded, its weights are"
"""In the log, once the trainer of a process can train; a rehearsal sees by it that a killed one has resumed."""
TELL_WAIT_S = 15.0
"""A wait for a batch is logged so often, with what it is for."""
BEAT_S = 10.0
"""So often at least the ranks hear of each other while there is no batch."""
PHASES = {name: name for name in ("starting", "waiting", "training")} | {"publishing": "syncing"}
"""Phase of the process -> its state in heartbeats."""

_T = TypeVar("_T")


class Trainer:
    """The trainer, from the start of its process to the end."""

    def __init__(
        self,
        config: Config,
        data: Requester,
        publisher: Publisher,
        stop: asyncio.Event,
        torch_thread: ThreadPoolExecutor,
        joined: asyncio.Event | None = None,
    ) -> None:
        """Nothing is told or published before `joined` is set."""
        self._joined = joined
        self.heartbeat = HeartbeatSender(publisher, "train", "train", self.load)
        self._config = config
        self._data = DataClient(data, self.heartbeat, stop, endpoints.DEADLINE_S)
        self._stop = stop
        self._torch_thread = torch_thread
        self._checkpoints = config.run.dir / "checkpoints"
        self._ranks = Ranks(config) if is_ranked(config) else None
        self._lead: RankedLearner | None = None  # the learner, where there are several ranks
        self._saver = CheckpointSaver(
            self._checkpoints,
            ranks=1 if self._ranks is None else self._ranks.member.size,
            trained=TrainedPart.of(config),
        )
        self._model = ""  # identity of the model folder
        self.channel = make_channel(config)
        self._progress = TrainerProgress()
        self._is_published = True  # the newest version, or that on its way, is the present weights
        self._skipped_in_a_row = 0
        self._time = PhaseTimer(PHASES, "starting")
        self._publications = Publications(self._data.tell, self._time.enter)
        self._stopping = False
        self._tokens = 0.0  # trained on since this process started
        self._updates: dict[int, Update] = {}  # by batch, until it is acknowledged

    async def run(self) -> None:
        """Resume from the last checkpoint, train, end with a checkpoint and weights on disk."""
        error: BaseException | None = None
        try:
            async with background(self._beats(), self._tell_end()):
                await self._run()
        except BaseException as raised:
            error = raised
            raise
        finally:
            await self._publications.close()
            with self._finishing("bringing its weights and its last checkpoint to disk"):
                # After an error a rank may not write its part.
                await self._in_torch(self._close, error is None or self._ranks is None)
            if self._ranks is not None:
                await self._in_torch(self._ranks.end, error)

    async def _run(self) -> None:
        try:
            learner = await self._begin()
        except StopRequested:
            return
        with MetricWriter(self._config, self._progress.updates) as curves:
            await self._train(learner, curves)
        self._stopping = True
        self._time.enter("publishing")
        self.heartbeat.beat()  # the next regular one may come too late
        with self._finishing("publishing its last weights"):
            if not self._is_published:
                await self._publish(learner)
            await self._publications.complete()
        with self._finishing("writing its last checkpoint"):
            await self._save_is_complete()
            if self._progress.batches_trained:
                await self._checkpoint(learner)
                await self._save_is_complete()
        log.info("ends after %d updates, at v%d", self._progress.updates, self._version)

    def load(self) -> Load:
        """Return the heartbeat's changing part."""
        is_ending = self._stopping or self._stop.is_set()
        state = "stopping" if is_ending else PHASES[self._time.phase]
        gauges = {
            "updates": float(self._progress.updates),
            "skipped": float(self._progress.skipped),
            "tokens": self._tokens,
            **as_gauges([self._time]),
            **({} if self._lead is None else self._lead.gauges),
        }
        return Load(state, self._version, gauges)

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for a batch, or for data to take a message."""
        return self._time.phase == "waiting"

    @property
    def _version(self) -> int:
        return self._progress.policy_version

    # --- begin ------------------------------------------------------------------------------

    async def _begin(self) -> Learner:
        """Load the learner at its last checkpoint, publish its weights, report both to data."""
        with self.heartbeat.waiting("the model to load", on="model"):
            learner = await self._in_torch(self._load)
        known = await self._greet()
        published = await self._in_torch(self._resume_weights, learner, known)
        self._progress = self._progress.model_copy(
            update={"policy_version": published.policy_version, "batches_trained": []}
        )
        await self._publications.announce(published, self._updates_applied)
        learner.before_change = self._publications.before_change
        log.info("%s %s v%d", self._config.model.path, LOADED, self._version)
        return learner

    async def _greet(self) -> KnownVersion | None:
        """Tell data the checkpoint; the newest version that it knows. Raises StopRequested."""
        hello = TrainerHello(
            policy_version=self._version,
            last_batch_id=self._progress.last_batch_id,
            updates=self._updates_applied,
        )
        if self._joined is not None:
            with self.heartbeat.waiting(JOINING, on="data"):
                await unless_stopped(self._stop, self._joined.wait())
        with self.heartbeat.waiting("data to take TrainerHello", on="data"):
            reply = await self._data.ask(hello)
        assert isinstance(reply, HelloReply)
        if reply.policy_version < 0:
            return None
        return KnownVersion(reply.policy_version, reply.digest)

    @property
    def _updates_applied(self) -> int:
        """Updates that changed the weights."""
        return self._progress.updates - self._progress.skipped

    def _load(self) -> Learner:
        learner = self._make_learner()
        with self._alone("reading the model folder and the checkpoints"):
            self._model = identity_of(self._config)
            checkpoint = load_newest(self._checkpoints)
        torch.manual_seed(self._config.run.seed % 2**64)  # libraries may have changed it
        if checkpoint is not None:
            checkpoint.refuse_other(self._model, TrainedPart.of(self._config))
            if self._lead is not None:
                self._lead.begin_restore(checkpoint.path)
            try:
                learner.restore(checkpoint.tensors)
            except ValueError as error:
                raise ConfigError(
                    f"model.path = {self._config.model.path!r} does not fit {checkpoint.path}: {error}; "
                    "set [model] as it was, or choose another run.dir"
                ) from None
            torch.set_rng_state(checkpoint.generator)
            self._progress = checkpoint.progress
            log.info("resumes from %s, batch %d", checkpoint.path, self._progress.last_batch_id)
        return learner

    def _make_learner(self) -> Learner:
        if self._ranks is None or self._config.train.learner != "torch":
            return make_learner(self._config)
        from dart_cli.train.ranks.lead import RankedLearner

        self._lead = RankedLearner.begin(self._config, self._ranks)
        return self._lead

    async def _tell_end(self) -> None:
        """Tell data at once that this process is about to end, and a person what it finishes before."""
        await self._stop.wait()
        beat = self.heartbeat.beat()
        if self._time.phase in ("training", "publishing"):
            log.info("ends after %s, within %.0f s", beat.waiting_for, LAST_WORK_S)

    @contextlib.contextmanager
    def _finishing(self, what: str) -> Iterator[None]:
        """While inside, the end of this process waits for `what`, and heartbeats name it."""
        with finishing(what), self.heartbeat.waiting(what, on="update"):
            yield

    async def _beats(self) -> None:
        """Tell the other ranks that this one lives, whenever the torch thread has nothing to do."""
        while True:
            await asyncio.sleep(min(BEAT_S, self._config.train.rank_deadline_s / 4))
            if self._lead is not None:
                await self._in_torch(self._lead.beat)

    def _alone(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around long work of torch's thread in which the other ranks, if there are any, have no part."""
        return contextlib.nullcontext() if self._lead is None else self._lead.alone(what)

    def _resume_weights(self, learner: Learner, known: KnownVersion | None) -> Published:
        model = learner.model
        weights = read_all(model.stream())
        with self._alone("publishing its weights"):
            return self.channel.resume(weights, self._version, known)

    # --- train ------------------------------------------------------------------------------

    async def _train(self, learner: Learner, curves: MetricWriter) -> None:
        """Take a batch, update, checkpoint, publish, acknowledge; until done or stopped."""
        while self._progress.updates < self._config.train.updates and not self._stop.is_set():
            self._time.enter("waiting")
            began = time.monotonic()
            try:
                batch = await self._next_batch()
            except StopRequested:
                return
            waiting_s = time.monotonic() - began
            if batch.batch_id <= self._progress.last_batch_id:
                log.warning("batch %d is already in the weights", batch.batch_id)
                await self._acknowledge(batch, {})
                continue
            with finishing(f"in its update on batch {batch.batch_id}"):
                metrics = await self._step(learner, batch, curves) | {"waiting_s": waiting_s}
                self._time.enter("waiting")
                self._record(batch, curves, metrics)
                await self._acknowledge(batch, metrics)

    async def _next_batch(self) -> Batch:
        """Return the next batch, however long it takes to fill.

        Raises StopRequested, and the errors of a checkpoint or publication that failed meanwhile.
        """
        reason, began = "data to answer", time.monotonic()
        told = began
        while True:
            self._note_saved(self._saver.poll())
            self._publications.raise_failed()
            if time.monotonic() - told >= TELL_WAIT_S:
                told = time.monotonic()
                log.info("has waited %.0f s for a batch: %s", told - began, reason)
            with self.heartbeat.waiting(f"a batch: {reason}", since=began, on="batch"):
                reply = await self._data.ask(BatchRequest(policy_version=self._version))
                assert isinstance(reply, BatchReply)
                if reply.batch is not None:
                    return reply.batch
                await unless_stopped(self._stop, asyncio.sleep(reply.retry_after_s))
            reason = reply.reason

    async def _step(self, learner: Learner, batch: Batch, curves: MetricWriter) -> dict[str, float]:
        """Update on `batch`, checkpoint and publish where due; returns the metrics.

        Raises ParityError where engine and trainer disagree; the batch is then not acknowledged.
        """
        began = time.monotonic()
        self._time.enter("training")
        seen = batch_metrics(batch, self._version)
        with self.heartbeat.waiting(f"its update on batch {batch.batch_id}", on="update"):
            update: Update = await self._in_torch(
                learner.update,
                batch,
                self._progress.updates,
                self._version if self._is_published else None,
            )
        if update.alarm:
            curves.add(self._progress.updates + 1, named_metrics(batch, update.metrics))
            raise ParityError(update.alarm)
        self._note(batch, update)
        self._time.enter("publishing")
        times = {"checkpoint_s": 0.0}
        with self.heartbeat.waiting("its weights to be written", on="update"):
            if self._progress.updates % self._config.train.checkpoint_every == 0:
                copying = time.monotonic()
                await self._checkpoint(learner)
                times["checkpoint_s"] = time.monotonic() - copying
            if self._is_publication_due():
                await self._publish(learner)
            if self._is_last:
                await self._publications.complete()
        times |= {"step_s": time.monotonic() - began, **self._publications.times()}
        self._tokens += update.metrics["tokens"]
        skipped = {"skipped": float(not update.applied)}
        return named_metrics(batch, skipped | dict(update.metrics) | seen | times)

    def _note(self, batch: Batch, update: Update) -> None:
        """Record that the batch is in the weights, or was skipped. Raises DartError after too many."""
        progress = self._progress
        self._updates[batch.batch_id] = update
        if update.applied:
            self._skipped_in_a_row = 0
        elif not batch.reuse:
            self._skipped_in_a_row += 1
        self._is_published = self._is_published and not update.applied
        if update.note:
            log.warning("batch %d: %s", batch.batch_id, update.note)
        if self._skipped_in_a_row >= MOST_SKIPPED:
            raise DartError(
                f"{MOST_SKIPPED} batches in a row were skipped, the last because of {update.note}; go "
                "back to an earlier checkpoint and lower train.lr"
            )
        self._progress = progress.model_copy(
            update={
                "updates": progress.updates + 1,
                "skipped": progress.skipped + (not update.applied),
                "last_batch_id": batch.batch_id,
                "batches_trained": [*progress.batches_trained, batch.batch_id],
            }
        )

    def _is_publication_due(self) -> bool:
        is_turn = self._progress.updates % self._config.weights.publish_every == 0
        return (is_turn or self._is_last) and not self._is_published

    @property
    def _is_last(self) -> bool:
        """Whether no update comes after those that are done."""
        return self._stop.is_set() or self._progress.updates == self._config.train.updates

    async def _checkpoint(self, learner: Learner) -> None:
        """Begin a checkpoint, once the one before is complete; it is written beside what follows."""
        await self._save_is_complete()
        await self._in_torch(self._begin_save, learner)

    def _begin_save(self, learner: Learner) -> None:
        if self._lead is not None:
            self._lead.begin_checkpoint(self._progress, self._model)
        self._saver.begin(self._progress, learner.state(), self._model)

    async def _save_is_complete(self) -> None:
        """Wait for the checkpoint in flight, if there is one. Raises CheckpointError.

        Not in torch's thread, which goes on telling the other ranks that this one lives.
        """
        self._note_saved(await asyncio.to_thread(self._saver.wait))

    def _note_saved(self, saved: TrainerProgress | None) -> None:
        """Take the batches of a complete checkpoint out of those trained on since the last one."""
        if saved is not None:
            rest = self._progress.batches_trained[len(saved.batches_trained) :]
            self._progress = self._progress.model_copy(update={"batches_trained": rest})

    def _close(self, is_saved: bool) -> None:
        """Wait for the checkpoint in flight, if it `is_saved`, and bring the weights to disk."""
        with self._alone("bringing its weights and its last checkpoint to disk"):
            try:
                if is_saved:
                    self._saver.wait()
            except CheckpointError as error:
                log.warning("%s", error)
            self.channel.close()

    async def _publish(self, learner: Learner) -> None:
        """Begin to publish the weights as the next version, which is announced once it is complete."""
        version = self._version + 1

        def begin() -> Publication:
            return self.channel.begin(learner.model.stream(), version)

        await self._publications.begin(lambda: self._in_torch(begin), self._updates_applied)
        self._is_published = True
        self._progress = self._progress.model_copy(update={"policy_version": version})

    async def _acknowledge(self, batch: Batch, metrics: dict[str, float]) -> None:
        update = self._updates.pop(batch.batch_id, None)
        await self._data.tell(
            BatchTrained(
                batch_id=batch.batch_id,
                policy_version=self._version,
                metrics=metrics,
                mismatches=update.mismatches if update else [],
                values=update.values if update else [],
            )
        )

    def _record(self, batch: Batch, curves: MetricWriter, metrics: dict[str, float]) -> None:
        curves.add(self._progress.updates, metrics)
        values = {name.removeprefix(REPLAY_METRIC): value for name, value in metrics.items()}
        log.info(
            "update %d on batch %d%s: loss %.4f, success %s, reward %s, entropy %.3f, grad norm %.3f, "
            "%d samples in %.1f s, v%d",
            *(self._progress.updates, self._progress.last_batch_id),
            f" (replay {batch.reuse})" if batch.reuse else "",
            values.get("loss", 0.0),
            *map(fraction, (batch.success, batch.reward)),
            *(values.get(name, 0.0) for name in ("entropy", "grad_norm", "samples")),
            values["step_s"],
            self._version,
        )

    async def _in_torch(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Run a function in torch's thread, beside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._torch_thread, function, *arguments)


# --- what a configuration asks for ------------------------------------------------------------


def identity_of(config: Config) -> str:
    """Return what tells the model folder from another one; empty without a model. Raises ModelError."""
    if config.train.learner != "torch":
        return ""
    from dart_cli.config.model_folder import resolve

    return model_identity(resolve(config.model.path))


def make_learner(config: Config) -> Learner:
    """Return the learner that a configuration asks for, its model loaded. Raises ModelError, ConfigError."""
    if config.train.learner != "torch":
        return make_own("train.learner", config.train.learner, config, Learner)  # type: ignore[type-abstract]
    from dart_cli.train.learner import PolicyLearner
    from dart_cli.train.trained_policy import TrainModel

    return PolicyLearner(TrainModel.load(config), config.train)
