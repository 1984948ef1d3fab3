"""What a rehearsal changes of a configuration, and why; everything else is as written.

    Rehearsal   the configuration, its rehearsal's, and where that lives
    Change      one key: as written, in the rehearsal
    make_plan   the changes, as overrides of the same TOML file; the miniature is made for them

The run, its evaluation and its export are started with these overrides, as a person would type them.
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
"""Most environment processes, rollout workers and trainer ranks; slots of an environment process, too."""
TOGETHER = 2
"""Most trajectories of a group, and groups of a batch."""
EPISODES = 4
"""Most episodes of the evaluation."""
MARK = "smoke_test.json"
"""What makes a folder a rehearsal's, which may be removed."""


@dataclass(frozen=True)
class Change:
    """One key of the configuration."""

    key: str
    written: Any
    rehearsed: Any
    why: str = ""

    @property
    def override(self) -> str:
        """As `--set` takes it."""
        return f"{self.key}={to_toml(self.rehearsed)}"


@dataclass
class Rehearsal:
    """One rehearsal."""

    path: Path  # the TOML file
    given: list[str]  # the user's overrides
    written: Config
    folder: Path  # all that the rehearsal writes
    screen: tuple[int, int]  # width and height of a screen, pixels
    changes: list[Change] = field(default_factory=list)
    published: str = (
        ""  # the checkpoint whose shape stands in for the model; empty where its folder is here
    )
    numbers: tuple[int, int] = (
        0,
        0,
    )  # of the model as written, and of the miniature; 0 where it is the same

    @property
    def overrides(self) -> list[str]:
        """The user's, then ours."""
        return [*self.given, *(change.override for change in self.changes)]

    @property
    def arguments(self) -> list[str]:
        """Those of any verb of `dart` that names a run."""
        return [str(self.path), *(part for each in self.overrides for part in ("--set", each))]

    @property
    def config(self) -> Config:
        """The configuration that is played."""
        return load_config(self.path, self.overrides)

    @property
    def has_model(self) -> bool:
        """Return whether a model is played that dart loads."""
        written = self.written
        return written.rollout.engine in MODEL_ENGINES or written.train.learner == "torch"

    def reduce(self, values: Mapping[str, Any], why: str) -> None:
        """Change more keys, or the same ones further."""
        for key, value in values.items():
            before = self.changed(key)
            written = value_of(self.written, key) if before is None else before.written
            self.changes = [each for each in self.changes if each is not before]
            self.changes.append(Change(key, written, value, why))

    def changed(self, key: str) -> Change | None:
        """Return the change of a key; None where it is as written."""
        return next((each for each in self.changes if each.key == key), None)


def make_plan(path: Path, given: list[str]) -> Rehearsal:
    """Return the rehearsal of a TOML file with the user's overrides, its folder made anew.

    Raises ConfigError as `load_config` does and for a miniature that cannot act, ModelError where the model's
    small files cannot be read, RunDirectoryError for a folder that is no rehearsal's.
    """
    written = load_config(path, given)
    where = written.run.dir.with_name(f"{written.run.dir.name}.rehearsal")
    _refuse_other(where, written)
    shutil.rmtree(where, ignore_errors=True)
    make_private_dir(where)
    (where / MARK).touch()
    screen = run_screen(written)
    plan = Rehearsal(path, given, written, where, screen)
    for change in _changes(written, where):
        if change.written != change.rehearsed:
            plan.changes.append(change)
    _with_model(plan)
    return plan


def _refuse_other(folder: Path, written: Config) -> None:
    """Raise RunDirectoryError where the folder is not a rehearsal's: nothing of it is removed."""
    if folder.resolve() == written.run.dir.resolve():
        raise RunDirectoryError(f"{folder} is the run's own directory; set another run.dir")
    if folder.exists() and not (folder.is_dir() and (folder / MARK).is_file()):
        raise RunDirectoryError(
            f"{folder} exists and is no rehearsal's, it has no {MARK}; move it away, or set another run.dir"
        )


def _changes(config: Config, folder: Path) -> Iterator[Change]:
    """Yield what is changed beside the model; a change to what is written already is none."""

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
    yield to("env.suite", suite_file(folder, config.env.suite), "a coin beside its verdicts")
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
    yield at_most("data.group_size", TOGETHER)
    yield at_most("data.groups_per_batch", TOGETHER)
    yield at_most("data.max_open_groups", 2 * TOGETHER)
    if config.data.pool_ratio:
        yield to("data.pool_ratio", 1 / TOGETHER, "one of a group")
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
    """Whether this processor does: without, a product takes 36 times as long as in float32 (torch 2.13, AVX2)."""
    import torch

    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # by no public name
    return is_supported is None or bool(is_supported())


def _free_port() -> int:
    """Return the first of three tcp ports, as far as one that is free tells."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return min(int(probe.getsockname()[1]), 64_990)


def _with_model(plan: Rehearsal) -> None:
    """Add the miniature; a model that ships is small enough as it is."""
    config = plan.written
    if config.model.path in BUILTIN or not plan.has_model:
        return
    from dart_cli.config.architecture import shape_of
    from dart_cli.smoke_test.miniature_model import write_miniature
    from dart_cli.smoke_test.published_model_files import write_stand_in

    source = model_folder(config.model.path)
    name = source.name
    if not source.is_dir():
        source = plan.folder / "stand-in" / name
        source.parent.mkdir()
        plan.published = write_stand_in(config, source)
    made = plan.folder / "model" / name
    made.parent.mkdir()
    writing = write_miniature(source, made, config, plan.screen)
    if writing is None:
        raise ConfigError(
            f'policy.action_parser = "{config.policy.action_parser}": the tokenizer in {source} cuts none of its actions into '
            'tokens that are all different, which the miniature needs; rehearse with --set policy.action_parser="uitars"'
        )
    whole, small = (shape_of(read_json(each, "config.json")) for each in (source, made))
    plan.numbers = whole.parameters, small.parameters
    plan.changes.append(Change("model.path", config.model.path, str(made), "its miniature"))
    for key in ("model.adapters", "policy.verifier"):
        if value_of(config, key):
            plan.changes.append(Change(key, value_of(config, key), "", "of the whole model"))
    if config.policy.family not in ("none", "auto"):
        family = config.policy.family  # which the miniature's folder does not show
        plan.changes.append(Change("policy.family", family, family))
