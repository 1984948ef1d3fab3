"""A rank above 0: it executes the commands of rank 0, and ends with it.

    serve    runs the process; torchrun's `dart train` and `python -m dart_cli.train.ranks.follower` call it
    follow   executes commands of rank 0, until STOP

It has no connection to the bus and writes no metrics. It ignores signals that ask a run to end, since rank
0 handles them: rank 0 finishes its update and its last checkpoint, for which it needs the other ranks, then
sends STOP.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bus.codec import BATCH_LIMITS, parted
from bus.errors import RankError
from bus.ranks import Share
from dart_cli.config.schema import Config
from dart_cli.runtime.logs import ignore_dumps, logging_to, stacks_to
from dart_cli.runtime.role import limit_threads, stop_signals
from dart_cli.train.checkpoints.identity import TrainerProgress
from dart_cli.train.ranks.watch import CONFIG, FOLDER_VARIABLE, membership

if TYPE_CHECKING:
    from dart_cli.train.checkpoints.checkpoint import CheckpointSaver
    from dart_cli.train.learner import PolicyLearner
    from dart_cli.train.ranks.distributed import DistributedGroup

log = logging.getLogger(__name__)


def serve(config: Config) -> int:
    """Run a rank above 0 until rank 0 sends STOP; return the exit code."""
    ignore_dumps()
    limit_threads(config.train.threads)
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    member = membership(config)
    with (
        logging_to(config.run.dir, member.name, terminal=False) as log_file,
        stacks_to(log_file),
    ):
        log.info("%s starts, pid %d, run %s", member.name, os.getpid(), config.run.dir)
        try:
            _work(config)
        except RankError as error:
            log.error("%s", error)
            return error.exit_code
        except Exception as error:
            log.exception("%s ends with an error", member.name)
            return int(getattr(error, "exit_code", 1))
        log.info("%s ended", member.name)
    return 0


def _work(config: Config) -> None:
    """Meet the other ranks, load the model, and follow rank 0 until STOP."""
    import torch

    from dart_cli.train.checkpoints.checkpoint import CheckpointSaver
    from dart_cli.train.learner import PolicyLearner
    from dart_cli.train.ranks.processes import Ranks
    from dart_cli.train.trained_policy import TrainModel

    torch.set_num_threads(config.train.threads)
    with Ranks(config) as ranks:
        rank_group = ranks.rank_group
        with rank_group.working("loading the model", within_s=ranks.start_s):
            model = TrainModel.load(config, rank_group.mesh)
            learner = PolicyLearner(model, config.train, rank_group)
        torch.manual_seed(config.run.seed % 2**64)
        saver = CheckpointSaver(
            config.run.dir / "checkpoints", rank=rank_group.rank, ranks=rank_group.size
        )
        follow(learner, rank_group, saver)
        saver.wait()


def follow(learner: PolicyLearner, rank_group: DistributedGroup, saver: CheckpointSaver) -> None:
    """Execute the commands of rank 0, until STOP. Raises RankError if another rank is lost."""
    import torch

    from dart_cli.train.checkpoints.checkpoint import load
    from dart_cli.train.ranks.distributed import Command
    from dart_cli.train.ranks.lead import OwnForward, train_share

    own = OwnForward(learner.model.scorer, rank_group.device)
    while True:
        command, more = rank_group.receive_command()
        if command is Command.STOP:
            return
        if command is Command.UPDATE:
            with rank_group.working("receiving its share"):
                share = parted(rank_group.receive_part(), BATCH_LIMITS)
            assert isinstance(share, Share)
            train_share(learner, rank_group, own, share, time.monotonic())
        elif command is Command.PUBLISH:
            with rank_group.working("gathering the weights"):
                for _ in learner.model.stream().tensors:
                    pass
        elif command is Command.CHECKPOINT:
            with rank_group.working("beginning a checkpoint"):
                header = json.loads(more)
                progress = TrainerProgress.model_validate_json(header["progress"])
                saver.begin(progress, learner.state(), header["model"])
        elif command is Command.RESTORE:
            with rank_group.working("restoring a checkpoint", within_s=rank_group.disk_s):
                checkpoint = load(Path(more.decode()), verify=False)
                learner.restore(checkpoint.tensors)
                torch.set_rng_state(checkpoint.generator)
        elif command is Command.BEAT:
            rank_group.gather(b"")


if __name__ == "__main__":
    text = (Path(os.environ[FOLDER_VARIABLE]) / CONFIG).read_text(encoding="utf-8")
    sys.exit(serve(Config.model_validate_json(text)))
