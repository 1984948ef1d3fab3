"""The command lines of a run's processes, as a person would type them.

commands_of  the arguments of `dart` by worker name
placement    how many processes there are, and which GPUs the trainer and each rollout worker get
place        the same with GPUs named in the shell: `python -m dart_cli.runtime.commands CONFIG --train
             0,1 --set ...` prints it for scripts/tmux.sh
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bus.errors import ConfigError, DartError
from dart_cli.config.devices import gpu_names, gpus_per_worker
from dart_cli.config.load import Source, load_config
from dart_cli.config.rules import broken_rules
from dart_cli.config.rules.machine import GPUS, OF_UP
from dart_cli.config.schema import Config


def commands_of(config: Config, arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the processes of the run by name; data last, as the others talk to it until they end."""
    commands = {}
    counts = {
        "env": config.up.envs,
        "serve": int(config.up.serve),
        "rollout": config.up.rollouts,
    }
    for role, count in counts.items():
        for index in range(count):
            name = f"{role}-{index}"
            commands[name] = [role, *arguments, "--worker", name]
    commands["train"] = ["train", *arguments]
    commands["data"] = ["data", *arguments]
    return commands


def placement(config: Config) -> list[str]:
    """Return `envs 2`, `rollouts 1`, and of the GPUs that [up] names `train 0,1` and `rollout 2` for each worker.

    The GPUs are as CUDA_VISIBLE_DEVICES is to name them. Raises ConfigError for one that is not here.
    """
    each, listed = gpus_per_worker(config), gpu_names(config.up.rollout_gpus)
    shares = [("train", gpu_names(config.up.train_gpus))]
    shares += [("rollout", listed[at : at + each]) for at in range(0, len(listed), each)]
    return [
        f"envs {config.up.envs}",
        f"rollouts {config.up.rollouts}",
        *(f"{role} {','.join(gpus)}" for role, gpus in shares if gpus),
    ]


def place(path: Path, overrides: list[str], train: str = "", rollout: str = "") -> list[str]:
    """Return the `placement` of a run whose trainer or rollout workers get other GPUs, such as `0,1`.

    Each GPU of `train` is a rank; those of `rollout` are shared out by `vllm.tensor_parallel`. Raises
    ConfigError for GPUs that cannot be.
    """
    given = []
    if train:
        given += [f"up.train_gpus=[{train}]", f"train.ranks={train.count(',') + 1}"]
    if rollout:
        each = gpus_per_worker(load_config(path, overrides))
        workers = max(1, (rollout.count(",") + 1) // each)
        given += [f"up.rollout_gpus=[{rollout}]", f"up.rollouts={workers}"]
    overrides = [*overrides, *given]
    config = load_config(path, overrides)
    for found in (*broken_rules(GPUS, config), *broken_rules(OF_UP, config)):
        raise ConfigError(f"{found} {Source(path, tuple(overrides)).cite(found.subject)}")
    return placement(config)


def _main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="dart_cli.runtime.commands", allow_abbrev=False)
    parser.add_argument("path", type=Path)
    parser.add_argument("--train", default="")
    parser.add_argument("--rollout", default="")
    parser.add_argument("--set", action="append", default=[])
    given, _ = parser.parse_known_args(arguments)  # others, such as --force, are the roles' own
    try:
        lines = place(given.path, given.set, given.train, given.rollout)
    except DartError as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return error.exit_code
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
