"""The ranks of a trainer as one torch.distributed group, and what rank 0 tells the others.

    met                torchrun's ranks: the store by which they meet, the board of this start
    join               make the group: gloo for the CPU, NCCL for GPUs
    DistributedGroup   a RankGroup (group.py) of several processes
    Command            what rank 0 asks of all

Two groups: the default one carries the model (NCCL between GPUs, gloo on the CPU, through the one
argument `device`); a second one, gloo, carries commands, plans and screens, so that a wait for the next
batch occupies no GPU. While rank 0 has nothing to do it sends BEAT; while it does work of its own, its
watch tells the others that it lives (watch.py), so each wait of every rank has a deadline. Gloo's sockets have no authentication: ranks that `dart train` started are bound to 127.0.0.1
and meet through a file in the run directory. No pickle: bytes and tensors only.
"""

from __future__ import annotations

import enum
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bus.errors import ConfigError, MissingPartError, RankError
from dart_cli.hardware import accelerator
from dart_cli.train.ranks.watch import POLL_S, Membership, RankWatch, new_folder

_distributed: Any = torch.distributed  # whose type stubs lack most of what is used here

_BACKSTOP = 2.0
"""Torch's own time limits, in the watch's deadlines: the watch is first, and names the rank."""
DISK_S = 900.0
"""Seconds that a rank may read or write files of a model, if `train.rank_deadline_s` is less: some 100 GB
on a slow disk."""
SHARED_S = 60.0
"""Seconds after which a folder that another host made is visible on a shared file system."""
_BOARD = "dart-board"


class Command(enum.IntEnum):
    """What rank 0 asks of all ranks, itself included; each with bytes that say more."""

    BEAT = 0  # nothing: rank 0 waits, and lives
    UPDATE = 1  # learn from the share that follows
    PUBLISH = 2  # gather the weights on rank 0
    CHECKPOINT = 3  # write this rank's part
    RESTORE = 4  # read it
    STOP = 5  # end


class DistributedGroup:
    """See dart_cli.train.rank_group.RankGroup. Not thread-safe: the computing thread's."""

    def __init__(self, member: Membership, watch: RankWatch, device: torch.device) -> None:
        self.rank, self.size = member.rank, member.size
        self.device = device
        self.watch = watch
        self.mesh: DeviceMesh = init_device_mesh(device.type, (member.size,))
        self._commands = _distributed.new_group(backend="gloo")
        self._turn = 0

    def gathered(self, part: bytes) -> list[bytes]:
        """Return what each rank gave, in order of rank."""
        length = torch.tensor([len(part)])
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        with self.watch.raising():
            _distributed.all_gather(lengths, length, group=self._commands)
        mine = torch.zeros(max(1, *map(int, lengths)), dtype=torch.uint8)
        mine[: len(part)] = _as_tensor(part)
        parts = [torch.empty_like(mine) for _ in lengths]
        with self.watch.raising():
            _distributed.all_gather(parts, mine, group=self._commands)
        return [bytes(p[: int(n)].numpy()) for p, n in zip(parts, lengths, strict=True)]

    def doing(self, what: str) -> None:
        """Note what this rank begins; it has the deadline from now."""
        self.watch.doing(what)

    # --- rank 0 and the others --------------------------------------------------------------

    def tell(self, command: Command, more: bytes = b"") -> None:
        """Rank 0: begin a turn of all ranks. They must then make the same calls."""
        self._turn += 1
        self.watch.doing(f"sending {command.name}", turn=self._turn)
        head = torch.tensor([command, len(more)], dtype=torch.int64)
        with self.watch.raising():
            _distributed.broadcast(head, 0, group=self._commands)
            if more:
                _distributed.broadcast(_as_tensor(more), 0, group=self._commands)

    def heard(self) -> tuple[Command, bytes]:
        """Other ranks: the next command, by the deadline."""
        head = torch.zeros(2, dtype=torch.int64)
        self.watch.doing("waiting for a command of rank 0", awaits_rank_0=True)
        with self.watch.raising():
            _distributed.broadcast(head, 0, group=self._commands)
            command, length = Command(int(head[0])), int(head[1])
            self._turn += 1
            self.watch.doing(f"receiving {command.name}", turn=self._turn)
            more = torch.empty(length, dtype=torch.uint8)
            if length:
                _distributed.broadcast(more, 0, group=self._commands)
        return command, bytes(more.numpy())

    def deal(self, parts: Sequence[bytes]) -> None:
        """Rank 0: send each other rank its part; `parts` is by rank, its own is not sent."""
        with self.watch.raising():
            for rank in range(1, self.size):
                part = _as_tensor(parts[rank])
                _distributed.send(torch.tensor([len(part)]), rank, group=self._commands)
                _distributed.send(part, rank, group=self._commands)

    def dealt(self) -> bytes:
        """Other ranks: what rank 0 deals to this one."""
        length = torch.zeros(1, dtype=torch.int64)
        with self.watch.raising():
            _distributed.recv(length, 0, group=self._commands)
            part = torch.empty(int(length), dtype=torch.uint8)
            _distributed.recv(part, 0, group=self._commands)
        return bytes(part.numpy())

    def rest(self) -> None:
        """Note that this rank has done its part of the turn. Rank 0's next beat is soon."""
        within_s = self.disk_s if self.rank == 0 else None
        self.watch.doing("waiting for its next work", within_s=within_s)

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Rank 0: work in which no other rank has a part; they wait until it is done, for `disk_s`."""
        self.watch.doing(what, within_s=self.disk_s)
        yield
        self.rest()

    @property
    def disk_s(self) -> float:
        """Seconds that a rank may read or write files of a model."""
        return max(DISK_S, self.watch.deadline_s)

    @contextmanager
    def working(self, what: str, *, within_s: float | None = None) -> Iterator[None]:
        """Work of this rank, in which it may meet others; their end is raised as RankError."""
        self.watch.doing(what, within_s=within_s)
        with self.watch.raising():
            yield


def met(member: Membership, within_s: float) -> tuple[Membership, Any]:
    """Return this rank of torchrun's with the board of this start, and the store where ranks meet.

    The store is torch's. Rank 0 makes a new folder and names it in the store, which is this start's
    alone; torchrun's id and port may be those of an earlier start. Raises RankError where rank 0
    does not come within `within_s`, ConfigError where the folder is not on a shared file system.
    """
    limit = timedelta(seconds=within_s)
    # One store outlives torchrun's restarts, with what ranks that have ended left in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        found, _, _ = next(_distributed.rendezvous("env://", timeout=limit))
        store = _distributed.PrefixStore(f"attempt-{attempt}", found)
        store.set_timeout(limit)
        if member.rank == 0:
            folder = new_folder(member.folder)
            store.set(_BOARD, folder.name)
            return replace(member, folder=folder), store
        folder = member.folder / store.get(_BOARD).decode()
    except RuntimeError as error:
        raise RankError(
            f"rank {member.rank} of {member.size} met no rank 0 within {within_s:g} s: {error}"
        ) from error
    until = time.monotonic() + SHARED_S
    while not folder.is_dir():
        if time.monotonic() > until:
            raise ConfigError(
                f"{folder}, which rank 0 made, is not seen by rank {member.rank} on "
                f"{socket.gethostname()}: put run.dir on a file system that all hosts share"
            )
        time.sleep(POLL_S)
    return replace(member, folder=folder), store


@contextmanager
def join(
    member: Membership, device: torch.device, deadline_s: float, store: Any = None
) -> Iterator[None]:
    """Inside, this process is in the group of all ranks, which it leaves at the end.

    They meet by `store`, or else by a file on the board. Waits for the other ranks by torch's limit,
    which is longer than the watch's deadlines.
    """
    limit = timedelta(seconds=_BACKSTOP * max(deadline_s, DISK_S) + 60)
    if accelerator.is_gpu(device):
        accelerator.set_device_index(device)
    if member.is_ours:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if store is None:
        store = _distributed.FileStore(str(member.folder / "store"), member.size)
    store.set_timeout(limit)
    _distributed.init_process_group(
        accelerator.backend(device),
        store=store,
        rank=member.rank,
        world_size=member.size,
        timeout=limit,
    )
    try:
        yield
    finally:
        # A group whose other end has died is not waited for.
        _distributed.destroy_process_group()


def device_of(member: Membership, asked: str) -> torch.device:
    """Return the device of a rank: its own GPU of those that this process sees, or the CPU.

    Raises ConfigError, MissingPartError for devices that cannot be shared out.
    """
    if asked == "cpu" or (asked == "auto" and not accelerator.is_available()):
        return torch.device("cpu")
    if ":" in asked:
        raise ConfigError(
            f'train.device = "{asked}" names one GPU, and train.ranks takes one for each rank: set '
            '"cuda", and the GPUs with up.train_gpus'
        )
    if member.local_rank >= accelerator.device_count():
        raise MissingPartError(
            f"rank {member.rank} needs GPU {member.local_rank}, torch sees "
            f"{accelerator.device_count()}: set train.ranks to the GPUs there are, or up.train_gpus"
        )
    return torch.device(accelerator.KIND, member.local_rank)


def memory_mb(device: torch.device) -> float:
    """Return the most memory that this process has held: of its GPU, or else of the host."""
    if accelerator.is_gpu(device):
        return accelerator.max_memory_allocated(device) / 1e6
    unit = 1e6 if sys.platform == "darwin" else 1e3  # bytes, or kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _as_tensor(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )
