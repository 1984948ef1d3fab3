"""Messages of weight sets: who may take one when, and how it travels.

    rollout -> data   SyncRequest, SyncDone: which worker takes the newest weights, in turn
    rollout -> train  ManifestRequest, TransferRequest, RendezvousRequest: what of them, by which way
    train -> data     WeightsPublished

Units and axes as in bus/messages.py.
"""

from __future__ import annotations

from typing import ClassVar

from bus.messages import Ack, Count, Integer, Reply, Request, Seconds


class SyncReply(Reply):
    """data -> rollout: take these weights now, or ask again; the newest at the moment of granting."""

    granted: bool = False
    policy_version: Integer = -1
    path: str = ""  # directory with manifest.json
    digest: str = ""  # of the manifest
    reason: str = ""  # what the wait is for


class SyncRequest(Request):
    """rollout -> data: may I take newer weights? Held until a permit is free.

    At most weights.concurrent workers hold a permit. It is given back by SyncDone, by asking again,
    by the worker's death, or after PERMIT_S of dart_cli/config/schema/weights.py.
    """

    reply_type: ClassVar[type[Reply]] = SyncReply
    worker: str
    policy_version: Integer  # that serves now; -1 if none: it then delays no worker and never waits


class SyncDone(Request):
    """rollout -> data: the permit is free again; the outcome. The times do not overlap."""

    reply_type: ClassVar[type[Reply]] = Ack
    worker: str
    policy_version: Integer  # that was to be taken
    error: str  # why the set was refused; empty if it serves
    waited_s: Seconds  # for the permit
    transfer_s: Seconds  # receiving and checking the set; requests are served meanwhile
    pause_s: Seconds  # from the halt of the engine until it serves again
    in_flight: Integer  # requests in work when it began, all of which continue


class ManifestReply(Reply):
    """train -> rollout: the newest version's manifest.json."""

    text: bytes  # UTF-8


class ManifestRequest(Request):
    """rollout -> train: the manifest of your newest version, whose folder is not on my host."""

    reply_type: ClassVar[type[Reply]] = ManifestReply
    policy_version: Integer
    digest: str  # of the manifest


class RendezvousReply(Reply):
    """train -> rollout: those of the wanted values that are known so far."""

    values: dict[str, bytes]


class RendezvousRequest(Request):
    """rollout -> train: my addresses for the others of a group, and which of theirs I want."""

    reply_type: ClassVar[type[Reply]] = RendezvousReply
    group: str  # its name, from TransferReply
    values: dict[str, bytes] = {}  # to store
    added: dict[str, Integer] = {}  # to add to a counter; the reply has the sums
    wanted: list[str] = []  # keys


class TransferReply(Reply):
    """train -> rollout: the tensors come, join the group; or ask for this version; or ask again."""

    accepted: bool
    policy_version: Integer  # the newest that the trainer has published
    path: str  # directory with its manifest.json
    digest: str  # of the manifest
    group: str = ""  # where accepted: its name
    rank: Count = 0  # of this worker in it; the trainer has 0
    size: Count = 0  # processes in it
    tensors: list[str] = []  # names of those that come: what any worker of the group lacks


class TransferRequest(Request):
    """rollout -> train: let me take part in the next broadcast of that version.

    The answer is held until the broadcast begins. A new request replaces the worker's one before.
    """

    reply_type: ClassVar[type[Reply]] = TransferReply
    worker: str
    policy_version: Integer  # -1: which is the newest?
    digest: str  # of the manifest
    group: str = ""  # the worker is still in it, from an earlier broadcast
    tensors: list[str] = []  # names that the worker lacks


class WeightsPublished(Request):
    """train -> data: a weight set is complete on disk and may be taken."""

    reply_type: ClassVar[type[Reply]] = Ack
    policy_version: Integer
    path: str  # directory with manifest.json
    digest: str  # of the manifest
    updates: Count  # that changed the weights, since the run began
