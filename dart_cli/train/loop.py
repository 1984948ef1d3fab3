"""The life of the trainer: it takes batches and publishes new weights.

    Trainer.run             runs the trainer, from the start of its process (process.py) to the end
    Trainer._begin          loads the model or the last checkpoint, sends TrainerHello, publishes the weights
    Trainer._train          takes a batch, updates, checkpoints, publishes, acknowledges; repeats
    Trainer._train_on       does one update, with its checkpoint and publication when they are due
    HeartbeatSender         sends a heartbeat each second, while torch works in another thread
    DataClient              sends requests to the data service (data_client.py)
    Publications            completes publications beside the updates (publishing.py)

Each second of the process is counted as one of `seconds.starting`, `waiting` (for a batch, or for the data
service to accept a message), `training` (the update) and `publishing` (updates stand still for weights or
checkpoints; most of the work for these is done beside the following updates).

An update has five parts, in this order. This is what a crash after each part costs:

    update        Nothing. The batch was not acknowledged, so the data service serves it again.
    checkpoint    It begins here and is written beside what follows (checkpoints/checkpoint.py). Until it is
                  complete, the checkpoint before it counts, and a crash costs what `acknowledge` says. Once
                  it is complete, TrainerHello says that the batch is in it, and the data service marks the
                  batch as trained.
    publish       It begins here and is completed beside what follows. Until it is announced, the newest
                  version of the data service is the one before. No other announced weights get its number.
    acknowledge   It has the number of the version that is being published. The data service counts staleness
                  from that number, and lets no worker sample what would be too old by the time it is
                  trained on. After a crash, the batches since the last complete checkpoint are trained on
                  again: TrainerHello names the last batch of the checkpoint, and the data service serves
                  the later ones again, in order.
    announce      Workers hold weights that no checkpoint has. The resumed trainer publishes its weights under
                  the next number (FileChannel.resume), so versions never decrease, and the samples of the
                  lost weights are as stale as they would have been (dart_cli/data/versions.py).

So each batch is in the weights exactly once, relative to the checkpoint from which they descend.

A version is announced before the publication of the next one begins. The last version is announced before its
update is acknowledged, because the data service ends the run at that acknowledgement.

A trainer that is asked to end, or is told that the run is over, finishes the update that is under way,
publishes the weights, acknowledges, and writes its last checkpoint, all within LAST_WORK_S
(dart_cli/runtime/role.py). The data service waits for this (dart_cli/data/run_end.py), so the whole work of
the trainer is counted. If the trainer is killed meanwhile, or takes longer, the part that it has not
announced is not counted.
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

from bus.errors import CheckpointError, ConfigError, DartError, LogprobCheckError
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
from dart_cli.train.checkpoints.identity import TrainedPart, TrainerProgress, teacher_folder
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
"""Part of the log line after which a trainer can train; a smoke test looks for it to see that a trainer that
was killed has resumed."""
LOG_WAIT_S = 15.0
"""Seconds between two log lines about a wait for a batch."""
BEAT_S = 10.0
"""Longest time between two messages of rank 0 to the other ranks while there is no batch."""
PHASES = {name: name for name in ("starting", "waiting", "training")} | {"publishing": "syncing"}
"""Phase of the process -> its state in heartbeats."""

_T = TypeVar("_T")


class Trainer:
    """The trainer of a run, from the start of its process to the end."""

    def __init__(
        self,
        config: Config,
        data: Requester,
        publisher: Publisher,
        stop: asyncio.Event,
        torch_thread: ThreadPoolExecutor,
        joined: asyncio.Event | None = None,
    ) -> None:
        """Send and publish nothing before `joined` is set."""
        self._joined = joined
        self.heartbeat = HeartbeatSender(publisher, "train", "train", self.load)
        self._config = config
        self._data_service = DataClient(data, self.heartbeat, stop, endpoints.DEADLINE_S)
        self._stop = stop
        self._torch_thread = torch_thread
        self._checkpoints = config.run.dir / "checkpoints"
        self._ranks = Ranks(config) if is_ranked(config) else None
        self._lead: RankedLearner | None = None  # the learner, if there are several ranks
        self._saver = CheckpointSaver(
            self._checkpoints,
            ranks=1 if self._ranks is None else self._ranks.member.size,
            trained=TrainedPart.of(config),
        )
        self._model = ""  # identity of the model folder
        self.channel = make_channel(config)
        self._progress = TrainerProgress()
        # True if the newest version, announced or on its way, has the present weights.
        self._is_published = True
        self._skipped_in_a_row = 0
        self._time = PhaseTimer(PHASES, "starting")
        self._publications = Publications(self._data_service.tell, self._time.enter)
        self._stopping = False
        self._tokens = 0.0  # tokens trained on since this process started
        self._updates: dict[int, Update] = {}  # by batch, until it is acknowledged

    async def run(self) -> None:
        """Resume from the last checkpoint, train, end with a checkpoint and weights on disk."""
        error: BaseException | None = None
        try:
            async with background(self._send_beats(), self._announce_stop()):
                await self._run()
        except BaseException as raised:
            error = raised
            raise
        finally:
            await self._publications.close()
            with self._finishing("bringing its weights and its last checkpoint to disk"):
                # After an error, ranks may be unable to write their parts of a checkpoint.
                await self._in_torch(self._close, error is None or self._ranks is None)
            if self._ranks is not None:
                await self._in_torch(self._ranks.end, error)

    async def _run(self) -> None:
        """Begin, train, and finish the last publication and checkpoint; a stop ends it early."""
        try:
            learner = await self._begin()
        except StopRequested:
            return
        with MetricWriter(self._config, self._progress.updates) as curves:
            await self._train(learner, curves)
        self._stopping = True
        self._time.enter("publishing")
        self.heartbeat.beat()  # the next regular heartbeat may come too late
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
        """Return the part of a heartbeat that changes: the trainer's state, its version and its gauges."""
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
        """True while it waits for a batch, or for the data service to take a message."""
        return self._time.phase == "waiting"

    @property
    def _version(self) -> int:
        return self._progress.policy_version

    # --- begin ------------------------------------------------------------------------------

    async def _begin(self) -> Learner:
        """Return the learner at its last checkpoint; publish its weights, and report to the data service."""
        with self.heartbeat.waiting("the model to load", on="model"):
            learner = await self._in_torch(self._load)
        newest = await self._greet()
        published = await self._in_torch(self._resume_weights, learner, newest)
        self._progress = self._progress.model_copy(
            update={"policy_version": published.policy_version, "batches_trained": []}
        )
        await self._publications.announce(published, self._updates_applied)
        learner.before_change = self._publications.before_change
        log.info("%s %s v%d", self._config.model.path, LOADED, self._version)
        return learner

    async def _greet(self) -> KnownVersion | None:
        """Report the checkpoint to the data service, and return the newest version in its ledger.

        Return None if the ledger has no version. Raises StopRequested.
        """
        hello = TrainerHello(
            policy_version=self._version,
            last_batch_id=self._progress.last_batch_id,
            updates=self._updates_applied,
        )
        if self._joined is not None:
            with self.heartbeat.waiting(JOINING, on="data"):
                await unless_stopped(self._stop, self._joined.wait())
        with self.heartbeat.waiting("the data service to take TrainerHello", on="data"):
            reply = await self._data_service.ask(hello)
        assert isinstance(reply, HelloReply)
        if reply.policy_version < 0:
            return None
        return KnownVersion(reply.policy_version, reply.digest)

    @property
    def _updates_applied(self) -> int:
        """The number of updates that changed the weights."""
        return self._progress.updates - self._progress.skipped

    def _load(self) -> Learner:
        """Return the learner, at the newest checkpoint if there is one."""
        learner = self._make_learner()
        with self._alone("reading the model folder and the checkpoints"):
            self._model = identity_of(self._config)
            teacher = teacher_folder(self._config)
            self._saver.teacher = "" if teacher is None else model_identity(teacher)
            checkpoint = load_newest(self._checkpoints)
        torch.manual_seed(self._config.run.seed % 2**64)  # libraries may have changed it
        if checkpoint is not None:
            checkpoint.refuse_other(self._model, TrainedPart.of(self._config), self._saver.teacher)
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

    async def _announce_stop(self) -> None:
        """Once a stop is requested, send a heartbeat that says so, and log what is still finished."""
        await self._stop.wait()
        beat = self.heartbeat.beat()
        if self._time.phase in ("training", "publishing"):
            log.info("ends after %s, within %.0f s", beat.waiting_for, LAST_WORK_S)

    @contextlib.contextmanager
    def _finishing(self, what: str) -> Iterator[None]:
        """Make the end of this process wait for the block, and name it (`what`) in heartbeats."""
        with finishing(what), self.heartbeat.waiting(what, on="update"):
            yield

    async def _send_beats(self) -> None:
        """Tell the other ranks that this one lives, whenever the torch thread has nothing to do."""
        while True:
            await asyncio.sleep(min(BEAT_S, self._config.train.rank_deadline_s / 4))
            if self._lead is not None:
                await self._in_torch(self._lead.beat)

    def _alone(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context for long work of the torch thread in which no other rank has a part."""
        return contextlib.nullcontext() if self._lead is None else self._lead.alone(what)

    def _resume_weights(self, learner: Learner, newest: KnownVersion | None) -> Published:
        """Publish the weights of a trainer that begins, by FileChannel.resume; return their version."""
        model = learner.model
        weights = read_all(model.stream())
        with self._alone("publishing its weights"):
            return self.channel.resume(weights, self._version, newest)

    # --- train ------------------------------------------------------------------------------

    async def _train(self, learner: Learner, curves: MetricWriter) -> None:
        """Take a batch, update, checkpoint, publish, acknowledge; repeat to the last update or a stop."""
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
                metrics = await self._train_on(learner, batch, curves) | {"waiting_s": waiting_s}
                self._time.enter("waiting")
                self._record(batch, curves, metrics)
                await self._acknowledge(batch, metrics)

    async def _next_batch(self) -> Batch:
        """Wait for the next batch and return it.

        Raises StopRequested, and the errors of a checkpoint or publication that failed meanwhile.
        """
        reason, began = "the data service to answer", time.monotonic()
        logged_at = began
        while True:
            self._note_saved(self._saver.poll())
            self._publications.raise_failed()
            if time.monotonic() - logged_at >= LOG_WAIT_S:
                logged_at = time.monotonic()
                log.info("has waited %.0f s for a batch: %s", logged_at - began, reason)
            with self.heartbeat.waiting(f"a batch: {reason}", since=began, on="batch"):
                reply = await self._data_service.ask(BatchRequest(policy_version=self._version))
                assert isinstance(reply, BatchReply)
                if reply.batch is not None:
                    return reply.batch
                await unless_stopped(self._stop, asyncio.sleep(reply.retry_after_s))
            reason = reply.reason

    async def _train_on(
        self, learner: Learner, batch: Batch, curves: MetricWriter
    ) -> dict[str, float]:
        """Update on `batch`, checkpoint and publish if these are due; return the metrics.

        Raises LogprobCheckError if engine and trainer disagree; the batch is then not acknowledged.
        """
        # 1. Update the weights.
        began = time.monotonic()
        self._time.enter("training")
        of_batch = batch_metrics(batch, self._version)
        with self.heartbeat.waiting(f"its update on batch {batch.batch_id}", on="update"):
            update: Update = await self._in_torch(
                learner.update,
                batch,
                self._progress.updates,
                self._version if self._is_published else None,
            )
        if update.alarm:
            curves.add(self._progress.updates + 1, named_metrics(batch, update.metrics))
            raise LogprobCheckError(update.alarm)
        self._count(batch, update)
        # 2. Begin a checkpoint and a publication, if they are due.
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
        return named_metrics(batch, skipped | dict(update.metrics) | of_batch | times)

    def _count(self, batch: Batch, update: Update) -> None:
        """Record that the batch is in the weights, or was skipped.

        Raises DartError after MOST_SKIPPED skipped batches in a row.
        """
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
        """True if no further update follows."""
        return self._stop.is_set() or self._progress.updates == self._config.train.updates

    async def _checkpoint(self, learner: Learner) -> None:
        """Begin a checkpoint once the one before is complete; it is written beside what follows."""
        await self._save_is_complete()
        await self._in_torch(self._begin_save, learner)

    def _begin_save(self, learner: Learner) -> None:
        if self._lead is not None:
            self._lead.begin_checkpoint(self._progress, self._model)
        self._saver.begin(self._progress, learner.state(), self._model)

    async def _save_is_complete(self) -> None:
        """Wait for the checkpoint that is being written, if there is one. Raises CheckpointError.

        The wait is not in the torch thread, which must go on telling the other ranks that this one lives.
        """
        self._note_saved(await asyncio.to_thread(self._saver.wait))

    def _note_saved(self, saved: TrainerProgress | None) -> None:
        """Remove the batches of a complete checkpoint from the batches since the last one."""
        if saved is not None:
            rest = self._progress.batches_trained[len(saved.batches_trained) :]
            self._progress = self._progress.model_copy(update={"batches_trained": rest})

    def _close(self, is_saved: bool) -> None:
        """Bring the weights to disk; with `is_saved`, first wait for the checkpoint that is being written."""
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
        """Report to the data service that the batch is in the weights, with its metrics."""
        update = self._updates.pop(batch.batch_id, None)
        await self._data_service.tell(
            BatchTrained(
                batch_id=batch.batch_id,
                policy_version=self._version,
                metrics=metrics,
                mismatches=update.mismatches if update else [],
                values=update.values if update else [],
            )
        )

    def _record(self, batch: Batch, curves: MetricWriter, metrics: dict[str, float]) -> None:
        """Write the metrics of an update to the curves, and a line about it to the log."""
        curves.add(self._progress.updates, metrics)
        values = {name.removeprefix(REPLAY_METRIC): value for name, value in metrics.items()}
        log.info(
            "update %d on batch %d%s: loss %.4f, success %s, reward %s, entropy %.3f, grad norm %.3f, "
            "%d samples in %.1f s, v%d",
            self._progress.updates,
            self._progress.last_batch_id,
            f" (replay {batch.reuse})" if batch.reuse else "",
            values.get("loss", 0.0),
            fraction(batch.success),
            fraction(batch.reward),
            values.get("entropy", 0.0),
            values.get("grad_norm", 0.0),
            values.get("samples", 0.0),
            values["step_s"],
            self._version,
        )

    async def _in_torch(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Run a function in the torch thread, beside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._torch_thread, function, *arguments)


# --- what a configuration asks for ------------------------------------------------------------


def identity_of(config: Config) -> str:
    """Return the identity of the model folder; empty for a learner without a model. Raises ModelError."""
    if config.train.learner != "torch":
        return ""
    from dart_cli.config.model_folder import resolve

    return model_identity(resolve(config.model.path))


def make_learner(config: Config) -> Learner:
    """Load the model and return the learner that a configuration names. Raises ModelError, ConfigError."""
    if config.train.learner != "torch":
        return make_own("train.learner", config.train.learner, config, Learner)  # type: ignore[type-abstract]
    from dart_cli.train.learner import PolicyLearner
    from dart_cli.train.trained_policy import TrainModel

    return PolicyLearner(TrainModel.load(config), config.train)
