"""The ranks of a trainer as one torch.distributed group, and the commands of rank 0.

    meet_torchrun      returns the store by which ranks meet that torchrun started, and their board
    join               puts this process into the group: gloo for the CPU, NCCL for GPUs
    device_of          returns the device on which a rank computes
    DistributedGroup   a RankGroup (dart_cli/train/rank_group.py) of several processes
    Command            the commands that rank 0 sends to all ranks

There are two groups. The default group carries the model (NCCL between GPUs, gloo on the CPU, by the argument
`device`). A second group, always gloo, carries commands, plans and screens, so that a wait for the next batch
occupies no GPU.

Each wait of every rank has a deadline: while rank 0 has nothing to do, it sends BEAT; while it works alone,
its watch tells the others that it lives (watch.py). Gloo's sockets have no authentication, so ranks that
`dart train` started are bound to 127.0.0.1 and meet through a file in the run directory. Only bytes and
tensors are sent, no pickles.
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
"""Torch's own time limits, as a multiple of the watch's deadline: the watch acts first, and names the
rank."""
DISK_S = 900.0
"""Least deadline in seconds for reading or writing files of a model: some 100 GB on a slow disk."""
SHARED_S = 60.0
"""Seconds within which a folder that another host made must be visible on a shared file system."""
_BOARD = "dart-board"


class Command(enum.IntEnum):
    """A command of rank 0 to all ranks, itself included. Bytes with details may follow it."""

    BEAT = 0  # do nothing: rank 0 lives, and waits
    UPDATE = 1  # learn from the share that follows
    PUBLISH = 2  # gather the weights on rank 0
    CHECKPOINT = 3  # write this rank's part of a checkpoint
    RESTORE = 4  # read this rank's part of a checkpoint
    STOP = 5  # end


class DistributedGroup:
    """A RankGroup of several processes. Not thread-safe: only the computing thread may call it."""

    def __init__(self, member: Membership, watch: RankWatch, device: torch.device) -> None:
        self.rank, self.size = member.rank, member.size
        self.device = device
        self.watch = watch
        self.mesh: DeviceMesh = init_device_mesh(device.type, (member.size,))
        self._commands = _distributed.new_group(backend="gloo")
        self._turn = 0

    def gather(self, part: bytes) -> list[bytes]:
        """Return the parts of all ranks, in order of rank."""
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
        """Record what this rank begins; the deadline for it begins now."""
        self.watch.doing(what)

    # --- rank 0 and the others --------------------------------------------------------------

    def tell(self, command: Command, more: bytes = b"") -> None:
        """Send a command of rank 0, which begins a turn: all ranks must then make the same calls."""
        self._turn += 1
        self.watch.doing(f"sending {command.name}", turn=self._turn)
        head = torch.tensor([command, len(more)], dtype=torch.int64)
        with self.watch.raising():
            _distributed.broadcast(head, 0, group=self._commands)
            if more:
                _distributed.broadcast(_as_tensor(more), 0, group=self._commands)

    def receive_command(self) -> tuple[Command, bytes]:
        """Wait, in a rank above 0, for the next command of rank 0; return it with its details."""
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

    def send_parts(self, parts: Sequence[bytes]) -> None:
        """Send each other rank its part, from rank 0; `parts` is by rank, and the first is not sent."""
        with self.watch.raising():
            for rank in range(1, self.size):
                part = _as_tensor(parts[rank])
                _distributed.send(torch.tensor([len(part)]), rank, group=self._commands)
                _distributed.send(part, rank, group=self._commands)

    def receive_part(self) -> bytes:
        """Return the part that rank 0 sends to this rank."""
        length = torch.zeros(1, dtype=torch.int64)
        with self.watch.raising():
            _distributed.recv(length, 0, group=self._commands)
            part = torch.empty(int(length), dtype=torch.uint8)
            _distributed.recv(part, 0, group=self._commands)
        return bytes(part.numpy())

    def rest(self) -> None:
        """Record that this rank has done its part of the turn; rank 0 sends its next beat soon."""
        within_s = self.disk_s if self.rank == 0 else None
        self.watch.doing("waiting for its next work", within_s=within_s)

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Do work of rank 0 alone inside the block, within `disk_s`; the other ranks wait for its end."""
        self.watch.doing(what, within_s=self.disk_s)
        yield
        self.rest()

    @property
    def disk_s(self) -> float:
        """Seconds within which a rank must have read or written files of a model."""
        return max(DISK_S, self.watch.deadline_s)

    @contextmanager
    def working(self, what: str, *, within_s: float | None = None) -> Iterator[None]:
        """Do work inside the block that may wait for other ranks; if one is lost, raise RankError."""
        self.watch.doing(what, within_s=within_s)
        with self.watch.raising():
            yield


def meet_torchrun(member: Membership, within_s: float) -> tuple[Membership, Any]:
    """Return a rank that torchrun started, with the board of this start, and the store by which ranks meet.

    The store is torch's. Rank 0 makes a new folder for the board and writes its name to the store, which
    belongs to this start; torchrun's id and port may be the same as in an earlier start. Raises RankError
    if rank 0 does not come within `within_s`, and ConfigError if the folder is not on a shared file system.
    """
    limit = timedelta(seconds=within_s)
    # The store outlives torchrun's restarts, with the entries of ranks that have ended.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        shared_store, _, _ = next(_distributed.rendezvous("env://", timeout=limit))
        store = _distributed.PrefixStore(f"attempt-{attempt}", shared_store)
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
    """Put this process into the group of all ranks inside the block; it leaves the group at the end.

    Ranks meet by `store`, by default a file on the board. Torch's limit for the wait is longer than the
    watch's deadlines.
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
        # This does not wait for a group of which a process has died.
        _distributed.destroy_process_group()


def device_of(member: Membership, name: str) -> torch.device:
    """Return the device of a rank: its GPU among those that this process sees, or the CPU.

    `name` is the value of train.device. Raises ConfigError or MissingPartError if the ranks cannot have a
    device each.
    """
    if name == "cpu" or (name == "auto" and not accelerator.is_available()):
        return torch.device("cpu")
    if ":" in name:
        raise ConfigError(
            f'train.device = "{name}" names one GPU, and train.ranks takes one for each rank: set '
            '"cuda", and the GPUs with up.train_gpus'
        )
    if member.local_rank >= accelerator.device_count():
        raise MissingPartError(
            f"rank {member.rank} needs GPU {member.local_rank}, torch sees "
            f"{accelerator.device_count()}: set train.ranks to the GPUs there are, or up.train_gpus"
        )
    return torch.device(accelerator.KIND, member.local_rank)


def memory_mb(device: torch.device) -> float:
    """Return the most memory that this process has used, in MB: of its GPU, or main memory without a GPU."""
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
