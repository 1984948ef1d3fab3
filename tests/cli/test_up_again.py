"""`dart up` on a run directory that is in use already: continued, left alone, or set aside."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bus.errors import AttentionError, ConfigError, RunDirectoryError
from dart_cli.cli.main import main
from dart_cli.cli.up import run_up, set_aside
from dart_cli.config.load import load_config
from dart_cli.config.model_folder import BUILTIN
from dart_cli.config.schema import Config
from dart_cli.evaluation.results import ModeScore, TaskScore
from dart_cli.runtime.run_dir import claim, read_run, save_config
from dart_cli.runtime.supervisor import ChildError, Progress
from dart_cli.train.checkpoints.checkpoint import complete, draft_of
from dart_cli.train.checkpoints.checkpoint import path_of as checkpoint_path
from dart_cli.train.checkpoints.identity import (
    CheckpointState,
    TrainedPart,
    TrainerProgress,
    model_identity,
)
from dart_cli.weights.manifest import MANIFEST, path_of
from tests.inspection.parts import evaluation


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """The embedded suite, answered at random."""
    path = tmp_path / "c.toml"
    path.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[rollout]\nengine = "scripted"\n'
        '[env]\ntasks = ["mini/click", "mini/popup"]\nslots = 4\n'
        '[eval]\nepisodes = 12\ntasks = ["mini/click", "mini/popup", "mini/popup+menu"]\n'
    )
    return path


@pytest.fixture
def supervisors(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of each supervisor that `dart up` starts; the first is its last, as after Ctrl-C."""
    started: list[list[str]] = []

    class Recorded:
        def __init__(self, commands: Mapping[str, Sequence[str]], **_: Any) -> None:
            started.append(list(commands))

        async def run(self, stop: asyncio.Event) -> None:
            stop.set()

    monkeypatch.setattr("dart_cli.cli.up.Supervisor", Recorded)
    return started


@pytest.mark.parametrize(("episodes", "first"), [(0, "eval"), (10, "env-0")])
def test_a_before_without_a_valid_episode_is_played_again(
    config_path: Path, supervisors: list[list[str]], episodes: int, first: str
) -> None:
    config = load_config(config_path, ["eval.around=true"])
    (config.run.dir / "eval").mkdir(parents=True, mode=0o700)
    config.run.dir.chmod(0o700)
    score = TaskScore(task_id="a", episodes=episodes, passed=0, invalid=3, steps=0)
    mode = ModeScore(tasks=[score], heldout=[])
    kept = evaluation("before", 1).model_copy(update={"modes": {"sampled": mode, "greedy": mode}})
    (config.run.dir / "eval" / "before.json").write_text(kept.model_dump_json())
    assert run_up(config, config_path, [], fresh=False) == 130
    assert [commands[0] for commands in supervisors] == [first]


def test_a_run_that_ended_for_attention_is_reported_and_not_evaluated(
    config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    reported: list[str] = []

    class Recorded:
        def __init__(self, commands: Mapping[str, Sequence[str]], **_: Any) -> None:
            self._commands = commands

        async def run(self, _stop: asyncio.Event) -> None:
            started.extend(self._commands)
            if "data" in self._commands:
                raise ChildError("data ended with 3: it needed attention", AttentionError.exit_code)

    monkeypatch.setattr("dart_cli.cli.up.Supervisor", Recorded)
    monkeypatch.setattr(
        "dart_cli.cli.up.write_report", lambda *_, ended_by, **__: reported.append(ended_by)
    )
    config = load_config(config_path, ["eval.around=true"])
    with pytest.raises(ChildError, match="it needed attention") as ended:
        run_up(config, config_path, [], fresh=False)
    assert ended.value.exit_code == 3
    assert reported == ["data ended with 3: it needed attention"]
    assert started.count("eval") == 1


@pytest.mark.parametrize("role", ["data", "train"])
def test_a_run_that_was_started_by_hand_is_left_alone(
    config_path: Path, supervisors: list[list[str]], role: str
) -> None:
    config = load_config(config_path, ["eval.around=true"])
    config.run.dir.mkdir(mode=0o700)
    running = pytest.raises(RunDirectoryError, match=f"{role} is running already")
    with claim(config, role), running:
        run_up(config, config_path, [], fresh=False)
    assert supervisors == []
    run_up(config, config_path, [], fresh=False)
    assert supervisors, "an ended process blocks no new one"


def test_the_trainer_recovers_by_checkpoints_that_are_complete(
    config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Progress] = {}

    class Recorded:
        def __init__(self, _: object, *, progress: dict[str, Progress], **__: Any) -> None:
            given.update(progress)

        async def run(self, stop: asyncio.Event) -> None:
            stop.set()

    monkeypatch.setattr("dart_cli.cli.up.Supervisor", Recorded)
    config = load_config(config_path, ["eval.around=false"])
    run_up(config, config_path, [], fresh=False)
    [(name, progress)] = given.items()
    assert (name, progress.unit, progress.amount()) == ("train", "checkpoint", 0)
    folder = config.run.dir / "checkpoints"
    for made, wanted in (("c000010", 10), ("c1000000", 1_000_000), (".c2000000.draft", 1_000_000)):
        (folder / made).mkdir(parents=True)
        assert progress.amount() == wanted


def test_fresh_moves_the_old_run_aside_and_never_a_live_one(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"dir": tmp_path / "run"}})
    set_aside(config)  # nothing there: nothing to do
    for number in (1, 2):
        (tmp_path / "run").mkdir(mode=0o700)
        (tmp_path / "run" / "kept").write_text(str(number))
        (tmp_path / "run" / "weights" / ".v000000.draft").mkdir(parents=True)
        running = pytest.raises(RunDirectoryError, match="env-0 is running already")
        with claim(config, "env"), running:
            set_aside(config)
        set_aside(config)
        assert (tmp_path / f"run.{number}" / "kept").read_text() == str(number)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["run.dir", "weights.directory"])
def test_fresh_moves_no_folder_that_is_not_a_run_s(config_path: Path, key: str) -> None:
    other = config_path.parent / "docs"
    config = load_config(config_path, [f"{key}={other}"])
    config.run.dir.mkdir(mode=0o700)
    other.mkdir(exist_ok=True)
    (other / "config.json").write_text("{}")
    with pytest.raises(
        RunDirectoryError, match=rf"docs (is no run|holds no weight).*another {key}"
    ):
        set_aside(config)
    assert [path.name for path in other.iterdir()] == ["config.json"]
    assert config.run.dir.exists(), "both or neither"


@pytest.mark.parametrize("made", ["", "run.db", "eval", "workers"])
def test_fresh_moves_what_any_verb_left_and_weights_elsewhere(config_path: Path, made: str) -> None:
    elsewhere = config_path.parent / "weights"
    path_of(elsewhere, 3).mkdir(parents=True)
    (path_of(elsewhere, 3) / MANIFEST).touch()
    config = load_config(config_path, [f"weights.directory={elsewhere}"])
    (config.run.dir / made).mkdir(parents=True)
    set_aside(config)
    assert not config.run.dir.exists()
    assert (config_path.parent / "run.1" / made).exists()
    assert path_of(config_path.parent / "weights.1", 3).exists()


def test_a_run_of_another_suite_goes_on_by_force_alone(
    config_path: Path, supervisors: list[list[str]]
) -> None:
    played, now = (load_config(config_path, [f"env.suite={each}"]) for each in ("desk", "mini"))
    played.run.dir.mkdir(mode=0o700)
    save_config(played)
    with pytest.raises(ConfigError, match=r"env\.suite = 'mini', .* was started with 'desk'"):
        run_up(now, config_path, [], fresh=False)
    assert (supervisors, read_run(now.run.dir).env.suite) == ([], "desk")
    assert run_up(now, config_path, [], fresh=False, force=True) == 130
    assert len(supervisors) == 1
    assert read_run(now.run.dir).env.suite == "mini"


@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
@pytest.mark.parametrize("verb", ["up", "data", "train"])
@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        ([], ["model.lora.rank=4"], "model.lora is set, but there were no adapters"),
        (
            ["model.lora.alpha=8"],
            ["model.lora.alpha=16"],
            "model.lora.alpha = 16.0, but it was 8.0",
        ),
        ([], ["model.path=builtin:small"], "model"),
    ],
    ids=["added", "alpha", "folder"],
)
def test_a_run_whose_checkpoint_is_of_another_model_is_refused_before_anything_is_recorded(
    config_path: Path,
    supervisors: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    verb: str,
    before: list[str],
    now: list[str],
    line: str,
    force: bool,
) -> None:
    pytest.importorskip("peft")
    began = load_config(config_path, before)
    began.run.dir.mkdir(mode=0o700)
    save_config(began)
    draft_of(path_of_checkpoint(began)).mkdir(parents=True)
    identity = model_identity(BUILTIN[began.model.path])
    progress, part = TrainerProgress(updates=3), TrainedPart.of(began)
    state = CheckpointState(progress=progress, digests={}, model=identity, trained=part)
    complete(path_of_checkpoint(began), state)
    for dry_run in ([], ["--dry-run"]):
        arguments = [str(config_path), *(["--force"] if force else []), *dry_run]
        with pytest.raises(SystemExit) as ended:
            main([verb, *arguments, *(part for key in now for part in ("--set", key))])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {line}"), said
        assert said.count("\n") == 1
        assert supervisors == []
        assert read_run(began.run.dir) == began
    if verb == "up":  # a run that begins anew has no checkpoint
        run_up(load_config(config_path, now), config_path, [], fresh=True)
        assert len(supervisors) == 1


def path_of_checkpoint(config: Config) -> Path:
    return checkpoint_path(config.run.dir / "checkpoints", 3)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_whose_disk_is_full_is_refused_before_anything_starts(
    config_path: Path, supervisors: list[list[str]], monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    config = load_config(config_path, ["eval.around=true"])
    (config.run.dir / "eval").mkdir(parents=True)
    usage = shutil.disk_usage(config_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"too full.*1\.0 GB free at .*run; free some, or choose"):
        run_up(config, config_path, [], fresh=fresh)
    assert supervisors == []
    assert [path.name for path in config.run.dir.iterdir()] == ["eval"]
