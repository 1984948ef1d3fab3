"""Promises of the trainer's broadcast thread, with groups that are made at once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Collection
from functools import partial
from pathlib import Path

import pytest

from bus.errors import WeightsError
from bus.messages import Reply, Request
from bus.weights import ManifestReply, ManifestRequest, TransferReply, TransferRequest
from dart_cli.weights.broadcast import broadcaster as rounds
from dart_cli.weights.broadcast.broadcaster import RoundsThread, Version
from dart_cli.weights.broadcast.gloo import GlooGroup
from dart_cli.weights.broadcast.receiver import BroadcastReceiver
from dart_cli.weights.broadcast.rendezvous import GroupStore, Rendezvous
from dart_cli.weights.broadcast.transport import Member, Transport
from dart_cli.weights.flat_weights import FlatWeights, specs_of
from dart_cli.weights.manifest import Published, published
from tests.waiting import PATIENCE_S, wait_until
from tests.weights.broadcasting import tensors


class Group:
    """A group whose broadcasts succeed at once, or raise."""

    def __init__(self, name: str, errors: list[Exception]) -> None:
        self.name = name
        self._errors = errors

    def broadcast(self, flat: FlatWeights, names: Collection[str], _: object) -> int:
        if self._errors:
            raise self._errors.pop()
        return len(names) and len(flat.data)

    def close(self) -> None:
        pass


class Trainer:
    """The thread, and the newest version that it is to broadcast."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.newest: Version | None = None
        self.errors: list[Exception] = []
        monkeypatch.setattr(
            rounds, "join", lambda _transport, member, _store: Group(member.group, self.errors)
        )
        self.thread = RoundsThread(
            lambda: self.newest, Transport("gloo"), Rendezvous(), lambda *_: False
        )

    def publish(self, version: int) -> None:
        made = tensors(version)
        self.newest = Version(
            Published(version, Path("absent"), f"digest {version}", 1),
            FlatWeights.in_memory(specs_of(made)).fill(made),
        )

    def ask(self, version: int) -> TransferReply:
        return self.thread.ask(request(version)).result(PATIENCE_S)


def request(version: int, worker: str = "rollout-0") -> TransferRequest:
    return TransferRequest(
        worker=worker, policy_version=version, digest=f"digest {version}", tensors=["a"]
    )


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch):
    trainer = Trainer(monkeypatch)
    yield trainer
    trainer.thread.close()


@pytest.mark.parametrize("error", [WeightsError("a process hangs"), ValueError("not foreseen")])
def test_a_round_that_breaks_off_is_not_the_last_whatever_broke_it(
    trainer: Trainer, error: Exception
) -> None:
    trainer.publish(0)
    trainer.errors.append(error)
    for _ in range(2):
        assert trainer.ask(0).accepted
    assert not trainer.errors


def test_between_rounds_no_version_is_kept(trainer: Trainer) -> None:
    """Free the memory of the replaced version, which is 15 GB for a 7B."""
    trainer.publish(0)
    assert trainer.newest is not None
    first = weakref.ref(trainer.newest.tensors)
    assert trainer.ask(0).accepted
    trainer.publish(1)
    wait_until(lambda: gc.collect() >= 0 and first() is None, "its memory to be freed")


def test_a_version_whose_memory_another_one_has_is_not_broadcast(trainer: Trainer) -> None:
    trainer.publish(0)
    assert trainer.newest is not None
    assert trainer.newest.take(trainer.newest.tensors.layout) is not None
    assert not trainer.ask(0).accepted
    trainer.publish(1)
    assert trainer.ask(1).accepted


def test_a_worker_that_asked_and_left_is_in_no_round(trainer: Trainer) -> None:
    trainer.thread.ask(request(0, "rollout-9")).cancel()
    trainer.publish(0)
    assert trainer.ask(0).size == 2


def test_an_address_of_another_host_is_named() -> None:
    store = GroupStore(partial(Rendezvous().change, "g"), 0)
    with pytest.raises(WeightsError, match=r"gloo cannot listen at 192\.0\.2\.1"):
        GlooGroup(Transport("gloo", address="192.0.2.1"), Member("g", 0, 1), store)


@pytest.mark.parametrize("is_newer", [False, True])
async def test_a_worker_to_which_nothing_is_sent_asks_at_its_pace_and_gives_up_by_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_newer: bool
) -> None:
    """Count requests, also if the trainer names a newer version each time."""
    answers, manifests = 0, {}

    class Train:
        async def request(self, message: Request, _: float) -> Reply:
            nonlocal answers
            if isinstance(message, ManifestRequest):
                return ManifestReply(text=manifests[message.policy_version].text().encode())
            answers += 1
            version = answers if is_newer else 1
            flat = FlatWeights.in_memory(specs_of(tensors(1))).fill(tensors(1))
            made = flat.manifest(version, flat.digests())
            manifests[version], path = made, Path("absent")
            digest = published(path, made).digest
            return TransferReply(
                accepted=False, policy_version=version, path=str(path), digest=digest
            )

    receiver = BroadcastReceiver("rollout-0", Train(), tmp_path / "copy", Transport("gloo"), 0.25)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(WeightsError, match=r"no broadcast in 0\.25 s"):
            await receiver.receive(Path("absent"), 0, "digest 0")
    if not is_newer:
        assert answers <= 5  # at once, for its manifest; then every 0.1 s
    receiver.close()
