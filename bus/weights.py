"""The messages about weight sets: which worker may take one when, and how it is transferred.

    rollout -> data   SyncRequest, SyncDone: a worker takes the newest weights in its turn
    rollout -> train  ManifestRequest, TransferRequest, RendezvousRequest: the transfer of its tensors
    train -> data     WeightsPublished

Units and axes as in bus/messages.py.
"""

from __future__ import annotations

from typing import ClassVar

from bus.messages import Ack, Count, Integer, Reply, Request, Seconds


class SyncReply(Reply):
    """data -> rollout: the permit to take the newest weights, or what the worker waits for."""

    granted: bool = False
    policy_version: Integer = -1
    path: str = ""  # directory with manifest.json
    digest: str = ""  # of the manifest
    reason: str = ""  # what the worker waits for


class SyncRequest(Request):
    """rollout -> data: the worker would take newer weights; the request is held until a permit is free.

    At most weights.concurrent workers have a permit. It ends by SyncDone, by another SyncRequest, by the
    worker's death, or after PERMIT_S of dart_cli/config/schema/weights.py.
    """

    reply_type: ClassVar[type[Reply]] = SyncReply
    worker: str
    policy_version: Integer  # that it serves now; -1 if none, and then its permit does not count


class SyncDone(Request):
    """rollout -> data: the worker has taken the weights or refused them; its permit ends.

    The times do not overlap.
    """

    reply_type: ClassVar[type[Reply]] = Ack
    worker: str
    policy_version: Integer  # the version to take
    error: str  # why the set was refused; empty if it serves
    waited_s: Seconds  # for the permit
    transfer_s: Seconds  # for receiving and checking the set; requests are served meanwhile
    pause_s: Seconds  # from the halt of the engine until it serves again
    in_flight: Integer  # requests in work when it began; all of them continue


class ManifestReply(Reply):
    """train -> rollout: the newest version's manifest.json."""

    text: bytes  # UTF-8


class ManifestRequest(Request):
    """rollout -> train: a worker on another host needs the manifest of the newest version."""

    reply_type: ClassVar[type[Reply]] = ManifestReply
    policy_version: Integer
    digest: str  # of the manifest


class RendezvousReply(Reply):
    """train -> rollout: the values that are known so far, among those that were requested."""

    values: dict[str, bytes]


class RendezvousRequest(Request):
    """rollout -> train: a worker's addresses for the others of a group, and those that it requests."""

    reply_type: ClassVar[type[Reply]] = RendezvousReply
    group: str  # its name, from TransferReply
    values: dict[str, bytes] = {}  # to store
    added: dict[str, Integer] = {}  # to add to counters; the reply has the sums
    keys: list[str] = []  # keys whose values are requested


class TransferReply(Reply):
    """train -> rollout: the worker may join the group and receive the tensors; or it must ask again.

    If the trainer has another version by now, the worker asks for that one.
    """

    accepted: bool
    policy_version: Integer  # the newest that the trainer has published
    path: str  # directory with its manifest.json
    digest: str  # of the manifest
    group: str = ""  # its name, if accepted
    rank: Count = 0  # of this worker in the group; the trainer has 0
    size: Count = 0  # processes in the group
    tensors: list[str] = []  # names of the tensors that are sent: those that any worker lacks


class TransferRequest(Request):
    """rollout -> train: a worker asks to take part in the next broadcast of this version.

    The reply is held until the broadcast begins. A new request replaces the worker's earlier one.
    """

    reply_type: ClassVar[type[Reply]] = TransferReply
    worker: str
    policy_version: Integer  # -1 to ask which version is the newest
    digest: str  # of the manifest
    group: str = ""  # the group of an earlier broadcast that the worker is still in
    tensors: list[str] = []  # names that the worker lacks


class WeightsPublished(Request):
    """train -> data: a weight set is complete on disk, and workers may take it."""

    reply_type: ClassVar[type[Reply]] = Ack
    policy_version: Integer
    path: str  # directory with manifest.json
    digest: str  # of the manifest
    updates: Count  # updates in these weights, since the run began
