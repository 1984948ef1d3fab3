"""Processes of one world, for tests: each runs the same function, over gloo on 127.0.0.1.

The server that forks them imports torch, the models and the trainer once, so that a world starts in a
fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scripts.small_models import FAMILIES
from tests.waiting import PATIENCE_S

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "tests.train.rank_cases",
        "tests.train.sharded_cases",
        "tests.train.sharded_training",
        "transformers.models.qwen2.tokenization_qwen2",
        *(f"transformers.models.{kind}.modeling_{kind}" for kind in FAMILIES),
    ]
)


def run_world(
    size: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo"
) -> list[Any]:
    """Return the results of `function(rank, size, *arguments)` by rank; raise if one raised."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            _context.Process(
                target=_member,
                args=(
                    rank,
                    size,
                    Path(folder) / "store",
                    backend,
                    pipes[rank][1],
                    function,
                    arguments,
                ),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()  # so that the end of a process is the end of its pipe
        try:
            results = [_result(receiver) for receiver, _ in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
    errors = [text for ok, text in results if not ok]
    assert not errors, "\n".join(errors)
    return [value for _, value in results]


def _result(receiver: Connection) -> tuple[bool, Any]:
    if not receiver.poll(PATIENCE_S):
        return False, f"no result in {PATIENCE_S:g} s"
    try:
        return receiver.recv()
    except EOFError:
        return False, "a rank ended without a result"


def _member(
    rank: int,
    size: int,
    store: Path,
    backend: str,
    sender: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(store), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=PATIENCE_S),
        )
        sender.send((True, function(rank, size, *arguments)))
        dist.barrier()
    except BaseException:  # noqa: BLE001 - raised where the world was asked for
        sender.send((False, f"rank {rank}: {traceback.format_exc()}"))
