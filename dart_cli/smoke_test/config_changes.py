"""The keys of a configuration that a smoke test changes, and why. Every other key stays as it is.

    SmokeTestPlan     the user's configuration, the changed one, and the folder that the smoke test writes to
    Change            one key: its value in the configuration, and in the smoke test
    plan_smoke_test   makes the changes, as overrides of the same TOML file, and writes the miniature model

The commands that run, evaluate and export are started with these overrides, as a person would type them.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bus.endpoints import make_private_dir
from bus.errors import ConfigError, RunDirectoryError
from dart_cli.config.devices import vllm_problem
from dart_cli.config.load import load_config
from dart_cli.config.model_folder import BUILTIN, model_folder, read_json
from dart_cli.config.rules import value_of
from dart_cli.config.schema import MODEL_ENGINES, Config
from dart_cli.config.screens import run_screen
from dart_cli.config.values import to_toml
from dart_cli.smoke_test.coin_suite import suite_file

PROCESSES = 2
"""Most environment processes, rollout workers, trainer ranks, and slots of an environment process."""
GROUP_SIZE = 2
"""Most trajectories of a group, and groups of a batch."""
EPISODES = 4
"""Most episodes of the evaluation."""
MARK = "smoke-test.json"
"""The file that marks the folder of a smoke test, which a later one may remove."""


@dataclass(frozen=True)
class Change:
    """One changed key of the configuration."""

    key: str
    original: Any
    replacement: Any
    why: str = ""

    @property
    def override(self) -> str:
        """The argument of `--set` for this change."""
        return f"{self.key}={to_toml(self.replacement)}"


@dataclass
class SmokeTestPlan:
    """The configuration of one smoke test, and its folder."""

    path: Path  # the TOML file
    user_overrides: list[str]
    original: Config  # with the user's overrides
    folder: Path  # holds everything that the smoke test writes
    screen: tuple[int, int]  # width and height of a screen, pixels
    changes: list[Change] = field(default_factory=list)
    published: str = ""
    """The checkpoint whose shape is used because the model's folder is not here; empty if it is."""
    parameters: tuple[int, int] = (0, 0)
    """Parameters of the configured model and of its miniature; 0 if there is no miniature."""

    @property
    def overrides(self) -> list[str]:
        """Overrides of the TOML file: first the user's, then one for each change."""
        return [*self.user_overrides, *(change.override for change in self.changes)]

    @property
    def arguments(self) -> list[str]:
        """The arguments of a `dart` command that takes a configuration."""
        return [
            str(self.path),
            *(part for override in self.overrides for part in ("--set", override)),
        ]

    @property
    def config(self) -> Config:
        """The configuration that is played."""
        return load_config(self.path, self.overrides)

    @property
    def has_model(self) -> bool:
        """Whether the run has a model that dart itself loads."""
        original = self.original
        return original.rollout.engine in MODEL_ENGINES or original.train.learner == "torch"

    def reduce(self, values: Mapping[str, Any], why: str) -> None:
        """Set keys to smaller `values`. A key that is changed already keeps its original value."""
        for key, value in values.items():
            before = self.change_of(key)
            original = value_of(self.original, key) if before is None else before.original
            self.changes = [change for change in self.changes if change is not before]
            self.changes.append(Change(key, original, value, why))

    def change_of(self, key: str) -> Change | None:
        """Return the change of a key; None if it is not changed."""
        return next((change for change in self.changes if change.key == key), None)


def plan_smoke_test(path: Path, user_overrides: list[str]) -> SmokeTestPlan:
    """Return the plan for a TOML file with the user's overrides, and create its folder anew.

    Raises ConfigError as `load_config` does and for a miniature that cannot write actions, ModelError if the
    model's small files cannot be read, RunDirectoryError if the folder exists and is no smoke test's.
    """
    original = load_config(path, user_overrides)
    folder = original.run.dir.with_name(f"{original.run.dir.name}.smoke-test")
    _refuse_other(folder, original)
    shutil.rmtree(folder, ignore_errors=True)
    make_private_dir(folder)
    (folder / MARK).touch()
    screen = run_screen(original)
    plan = SmokeTestPlan(path, user_overrides, original, folder, screen)
    for change in _changes(original, folder):
        if change.original != change.replacement:
            plan.changes.append(change)
    _with_model(plan)
    return plan


def _refuse_other(folder: Path, original: Config) -> None:
    """Raise RunDirectoryError if `folder` is the run's own directory, or was not made by a smoke test."""
    if folder.resolve() == original.run.dir.resolve():
        raise RunDirectoryError(f"{folder} is the run's own directory; set another run.dir")
    if folder.exists() and not (folder.is_dir() and (folder / MARK).is_file()):
        raise RunDirectoryError(
            f"{folder} exists and is not the folder of a smoke test (it has no {MARK}); move it away, or set another run.dir"
        )


def _changes(config: Config, folder: Path) -> Iterator[Change]:
    """Yield the changes of all keys except the model's.

    The replacement may equal the original value; the caller leaves such changes out.
    """

    def to(key: str, value: Any, why: str = "") -> Change:
        return Change(key, value_of(config, key), value, why)

    def at_most(key: str, most: int) -> Change:
        return to(key, min(value_of(config, key), most))

    yield to("run.dir", str(folder / "run"), "its own directory")
    if config.weights.directory is not None:
        yield to("weights.directory", str(folder / "weights"), "its own directory")
    if config.bus.host:
        yield to("bus.host", "127.0.0.1", "one host")
        yield to("bus.port", _free_port(), "a free port")
    yield to(
        "env.suite",
        suite_file(folder, config.env.suite),
        "a coin decides, its verdicts are counted",
    )
    yield at_most("env.slots", PROCESSES)
    yield at_most("up.envs", PROCESSES)
    yield at_most("up.rollouts", PROCESSES)
    yield to("up.train_gpus", [])
    yield to("up.rollout_gpus", [])
    yield to("up.serve", False)
    if config.rollout.engine == "vllm" and (problem := vllm_problem()):
        yield to("rollout.engine", "transformers", problem.partition(";")[0])
    yield at_most("rollout.max_batch", 2 * PROCESSES)
    for key in ("rollout.device", "train.device"):
        yield to(key, "cpu")
    yield to("vllm.tensor_parallel", 1)
    yield at_most("data.group_size", GROUP_SIZE)
    yield at_most("data.groups_per_batch", GROUP_SIZE)
    yield at_most("data.max_open_groups", 2 * GROUP_SIZE)
    if config.data.pool_ratio:
        yield to("data.pool_ratio", 1 / GROUP_SIZE, "one of a group")
    yield at_most("train.ranks", PROCESSES)
    if config.model.dtype == "bfloat16" and not _multiplies_bfloat16():
        yield to("model.dtype", "float32", "this processor has no bfloat16, and torch's is slow")
    yield to("train.checkpoint_every", 1)
    if config.train.parity_every:
        yield to("train.parity_every", 1)
    yield to("train.wandb", "")
    yield to("train.offload", "none", "the CPU has masters and moments in main memory anyway")
    yield to("train.lr", config.train.rate)
    if config.weights.channel == "nccl":
        yield to("weights.channel", "gloo", "NCCL has no CPU")
    yield to("weights.publish_every", 1)
    yield at_most("eval.episodes", EPISODES)
    yield to("eval.attempts", 1)
    yield to("eval.protocol", "none")
    yield to("eval.around", False)


def _multiplies_bfloat16() -> bool:
    """Return True if this processor multiplies bfloat16.

    If it does not, a product takes 36 times as long as in float32 (torch 2.13, AVX2).
    """
    import torch

    # torch has no public name for this.
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_supported is None or bool(is_supported())


def _free_port() -> int:
    """Return a free TCP port. The two after it are most likely free, too, but are not tried."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return min(int(probe.getsockname()[1]), 64_990)


def _with_model(plan: SmokeTestPlan) -> None:
    """Write the miniature model and add it to the changes; do nothing for a model that ships with dart."""
    config = plan.original
    if config.model.path in BUILTIN or not plan.has_model:
        return
    from dart_cli.config.architecture import shape_of
    from dart_cli.smoke_test.miniature_model import write_miniature
    from dart_cli.smoke_test.published_model_files import write_published_files

    source = model_folder(config.model.path)
    name = source.name
    if not source.is_dir():
        source = plan.folder / "stand-in" / name
        source.parent.mkdir()
        plan.published = write_published_files(config, source)
    miniature = plan.folder / "model" / name
    miniature.parent.mkdir()
    chain = write_miniature(source, miniature, config, plan.screen)
    if chain is None:
        raise ConfigError(
            f'policy.action_parser = "{config.policy.action_parser}": the tokenizer in {source} splits none of its actions into '
            'tokens that all differ, which the miniature needs; run the smoke test with --set policy.action_parser="uitars"'
        )
    whole, small = (shape_of(read_json(model, "config.json")) for model in (source, miniature))
    plan.parameters = whole.parameters, small.parameters
    plan.changes.append(
        Change("model.path", config.model.path, str(miniature), "a miniature of it")
    )
    if config.train.teacher_weight and config.teacher.model:
        same = "the same miniature"
        plan.changes.append(Change("teacher.model", config.teacher.model, str(miniature), same))
    for key in ("model.adapters", "policy.verifier"):
        if value_of(config, key):
            plan.changes.append(Change(key, value_of(config, key), "", "made for the whole model"))
    if config.policy.family not in ("none", "auto"):
        family = config.policy.family  # the miniature's folder does not show it
        plan.changes.append(Change("policy.family", family, family))
