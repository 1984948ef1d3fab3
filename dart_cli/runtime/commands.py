"""The command lines of a run's processes, as a person would type them.

commands_of  returns worker name -> arguments of `dart`
placement    returns how many processes there are, and which GPUs the trainer and each rollout worker get
place        returns the placement for GPUs that are named in the shell. `python -m dart_cli.runtime.commands
             CONFIG --train 0,1 --set ...` prints it for scripts/tmux.sh
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
    """Return worker name -> arguments of `dart` for all processes of the run.

    The data service is last, because the others talk to it until they end.
    """
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
    """Return lines such as `envs 2`, `rollouts 1`, and `train 0,1`, `rollout 2` for the GPUs that [up] names.

    There is a `rollout` line for each worker. GPUs have the names that CUDA_VISIBLE_DEVICES needs. Raises
    ConfigError for a GPU that is not on this host.
    """
    per_worker, listed = gpus_per_worker(config), gpu_names(config.up.rollout_gpus)
    shares = [("train", gpu_names(config.up.train_gpus))]
    shares += [
        ("rollout", listed[at : at + per_worker]) for at in range(0, len(listed), per_worker)
    ]
    return [
        f"envs {config.up.envs}",
        f"rollouts {config.up.rollouts}",
        *(f"{role} {','.join(gpus)}" for role, gpus in shares if gpus),
    ]


def place(path: Path, overrides: list[str], train: str = "", rollout: str = "") -> list[str]:
    """Return the `placement` of a run with other GPUs for its trainer or rollout workers, such as `0,1`.

    Each GPU of `train` gets a rank. The GPUs of `rollout` are divided among workers by
    `vllm.tensor_parallel`. Raises ConfigError for GPUs that cannot be used.
    """
    gpu_overrides = []
    if train:
        gpu_overrides += [f"up.train_gpus=[{train}]", f"train.ranks={train.count(',') + 1}"]
    if rollout:
        per_worker = gpus_per_worker(load_config(path, overrides))
        workers = max(1, (rollout.count(",") + 1) // per_worker)
        gpu_overrides += [f"up.rollout_gpus=[{rollout}]", f"up.rollouts={workers}"]
    overrides = [*overrides, *gpu_overrides]
    config = load_config(path, overrides)
    for finding in (*broken_rules(GPUS, config), *broken_rules(OF_UP, config)):
        raise ConfigError(f"{finding} {Source(path, tuple(overrides)).cite(finding.subject)}")
    return placement(config)


def _main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="dart_cli.runtime.commands", allow_abbrev=False)
    parser.add_argument("path", type=Path)
    parser.add_argument("--train", default="")
    parser.add_argument("--rollout", default="")
    parser.add_argument("--set", action="append", default=[])
    # Other options, such as --force, are for the roles.
    options, _ = parser.parse_known_args(arguments)
    try:
        lines = place(options.path, options.set, options.train, options.rollout)
    except DartError as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return error.exit_code
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
