"""What processes were started with: what differs is refused, or told and stored."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from bus.endpoints import DATA, Endpoints
from bus.errors import ConfigError, ProtocolError
from bus.messages import JoinRequest, StatusReply, StatusRequest
from bus.requests import Requester
from bus.snapshot import Snapshot
from dart_cli.config.load import default_config
from dart_cli.config.readers import Settings
from dart_cli.data import service
from dart_cli.data.settings import RunSettings
from dart_cli.data.store.open import open_reader
from dart_cli.env import worker as env_worker
from dart_cli.runtime.run_dir import read_run, read_used, save_config
from tests.waiting import PATIENCE_S

Role = Literal["env", "serve", "rollout", "data", "train"]


@dataclass
class Run:
    """A run directory, and the data service's view of its processes."""

    path: Path
    overrides: tuple[str, ...] = ()
    stored: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin(*self.overrides)

    def begin(self, *overrides: str) -> None:
        """The data service starts."""
        config = default_config([f"run.dir={self.path}", *overrides])
        save_config(config)
        given = [each.partition("=")[0] for each in overrides]
        self.settings = RunSettings(
            config, lambda text: self.stored.append(json.loads(text)), given
        )

    def join(self, role: Role, *overrides: str, worker: str = "", **how: Any) -> list[str]:
        """A process of `role` joins, started with the same file and these --set."""
        mine = Settings.of(default_config([f"run.dir={self.path}", *overrides]))
        request = JoinRequest(
            role=role,
            worker=worker or role,
            **{
                "host": mine.host,
                "folder": mine.folder,
                "settings": dict(mine.changed),
                "set_keys": [each.partition("=")[0] for each in overrides],
            }
            | how,
        )
        return self.settings.join(request).notes

    @property
    def processes(self) -> Mapping[str, Any]:
        """As config.json has them."""
        return {name: its["settings"] for name, its in read_used(self.path).processes.items()}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_equal_settings_are_accepted_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = ("data.group_size=4", "train.lr=1e-4", "env.slots=3", "rollout.max_batch=2")
    run = Run(tmp_path, given)
    for role in ("env", "serve", "rollout", "train"):
        assert run.join(role, *given) == []  # type: ignore[arg-type]
    assert caplog.text == ""
    assert run.processes == {}


def test_what_a_process_reads_and_has_other_is_logged_told_and_stored(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    line = "train was started with train.lr = 0.0001, dart data without it, which does not use it"
    assert run.join("train", "train.lr=1e-4") == [line]
    assert caplog.messages == [line]
    assert read_run(run.path).train.lr == 1e-4
    assert run.stored[-1]["train"]["lr"] == 1e-4
    assert run.processes == {"train": {"train.lr": 1e-4}}
    assert run.settings.notes(["train"]) == [line]
    assert run.settings.notes(["env-0"]) == []
    assert run.settings.warnings(["train"]) == []


def test_the_value_that_is_kept_is_that_of_the_first_reader(run: Run) -> None:
    run.join("rollout", "env.slots=5", worker="rollout-0")
    assert read_run(run.path).env.slots == 16
    run.join("env", "env.slots=3", worker="env-0")
    assert read_run(run.path).env.slots == 3
    assert run.processes == {"rollout-0": {"env.slots": 5}, "env-0": {"env.slots": 3}}


UNREAD = [
    ("train", "data.group_size=4", "dart train does not read data.group_size; dart data does, and has 8, not 4"),
    ("rollout", "rollout.temperature=0.5", "dart rollout does not read rollout.temperature; dart data"),
    ("env", "train.lr=0.5", "dart env does not read train.lr; dart train does"),
    ("serve", "env.slots=2", "dart serve does not read env.slots; dart env does, and has 16, not 2"),
]  # fmt: skip


@pytest.mark.parametrize(("role", "override", "line"), UNREAD, ids=[each[1] for each in UNREAD])
def test_a_key_that_a_process_does_not_read_is_refused_and_its_reader_named(
    run: Run, role: Role, override: str, line: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        run.join(role, override)
    assert str(refused.value).startswith(line)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert run.processes == {}
    assert run.join(role) == []  # once it is left out


def test_a_key_that_is_not_read_is_accepted_where_its_reader_has_that_value(run: Run) -> None:
    run.join("train", "train.lr=1e-4")
    assert run.join("env", "train.lr=1e-4") == [
        "env was started with train.lr = 0.0001, dart data without it; dart env does not read it, dart train does"
    ]
    assert run.processes == {"train": {"train.lr": 1e-4}}
    with pytest.raises(ConfigError, match=r"dart train does, and has 0\.0001, not 0\.5"):
        run.join("env", "train.lr=0.5")


def test_a_set_of_the_process_that_reads_a_key_supersedes_the_file_of_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, ("data.group_size=4",))
    assert run.join("train") == []  # whose file has 8
    assert caplog.text == ""
    with pytest.raises(ConfigError, match=r"dart data does, and has 4, not 16"):
        run.join("train", "data.group_size=16")


def test_a_file_that_was_edited_between_two_starts_is_as_a_set(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"dart data does, and has 8, not 4.*or the same file"):
        run.join("train", "data.group_size=4", set_keys=[])
    [line] = run.join("train", "train.lr=1e-4", set_keys=[])
    assert "train.lr = 0.0001" in line


UNEQUAL: list[tuple[Role, str, str]] = [
    ("env", "policy.action_parser=uitars", "another prompt, or a text another action"),
    ("rollout", "policy.system_prompt=hello", "another prompt, or a text another action"),
    ("rollout", "model.dtype=bfloat16", "the engine's log-probabilities"),
    ("train", "model.path=builtin:small", "the engine's log-probabilities"),
    ("rollout", "model.lora.rank=8", "the engine's log-probabilities"),
    ("env", "env.suite=desk", "the tasks of another suite"),
    ("train", "train.updates=3", "when the run is over"),
    ("train", "weights.channel=gloo", "in another way"),
    ("serve", "rollout.temperature=0.5", "another temperature"),
]


@pytest.mark.parametrize(("role", "override", "why"), UNEQUAL, ids=[each[1] for each in UNEQUAL])
def test_a_key_that_must_be_equal_is_refused_with_the_reason(
    run: Run, role: Role, override: str, why: str
) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key} is .* for dart {role} and .*{why}") as refused:
        run.join(role, override)
    assert refused.value.exit_code == 2
    assert run.processes == {}


def test_several_differences_are_one_line(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"^policy\.action_parser .*\(1 more keys differ\)$"):
        run.join("rollout", "policy.action_parser=uitars", "policy.system_prompt=a")


def test_a_process_that_runs_already_is_warned_of_and_not_ended(run: Run) -> None:
    run.begin("policy.history_turns=2")
    [line] = run.join("env", worker="env-0", is_first=False)
    assert "policy.history_turns = 0, dart data with 2" in line
    assert run.settings.warnings(["env-0"]) == [line]
    assert run.join("env", "data.group_size=4", "policy.history_turns=2", worker="env-0", is_first=False)  # fmt: skip
    assert run.settings.warnings(["env-0"]) == []


def test_force_goes_on_and_dart_up_restarts_after_an_edit(run: Run) -> None:
    assert run.join("env", "policy.action_parser=uitars", is_forced=True)
    assert run.settings.warnings(["env"]) == []
    assert run.join("rollout", "data.group_size=4", is_supervised=True)
    with pytest.raises(ConfigError, match=r"^policy\.action_parser"):
        run.join("rollout", "policy.action_parser=uitars", is_supervised=True)


def test_a_process_that_starts_again_with_the_runs_own_settings_is_no_longer_kept(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.join("env", "env.slots=3", worker="env-0")
    assert read_run(run.path).env.slots == 3
    caplog.clear()
    run.join("env", worker="env-0")
    assert caplog.messages == ["env.slots was 3 for env-0, is 16 now"]
    assert run.processes == {}
    assert read_run(run.path).env.slots == 16


def test_a_run_that_goes_on_keeps_what_was_used_until_its_reader_joins_again(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.join("train", "train.lr=1e-4")
    run.join("env", "env.slots=3", worker="env-1")
    run.begin("data.group_size=4")
    assert [each for each in caplog.messages if "last start" in each] == [
        "data.group_size was 8 at the run's last start, is 4 now"
    ]
    assert json.loads(run.settings.used)["train"]["lr"] == 1e-4
    caplog.clear()
    run.join("train", "train.lr=0.5")
    assert "train.lr was 0.0001 for train, is 0.5 now" in caplog.messages
    run.join("env", worker="env-0")  # and env-1 is no process of this start
    assert run.processes == {"train": {"train.lr": 0.5}}


def test_a_path_is_compared_by_where_it_leads_and_never_with_another_host() -> None:
    here = Path.cwd()
    mine = Settings({"model.path": "models/a"}, "box", str(here))
    assert Settings({"model.path": str(here / "models" / "a")}, "box", "/").agrees(
        mine, "model.path"
    )
    assert not Settings({"model.path": "models/a/b"}, "box", str(here)).agrees(mine, "model.path")
    assert Settings({"model.path": "/elsewhere/a"}, "gpu-box", "/").agrees(mine, "model.path")
    assert not Settings({"policy.template": "a/b"}, "box", "/a").agrees(mine, "policy.template")


def test_only_a_host_with_the_model_folder_knows_what_auto_means() -> None:
    without = Settings({"policy.family": "auto"}, "box", "/")
    resolved = Settings(
        {"policy.family": "ui-tars", "policy.action_parser": "uitars", "policy.history_images": 5},
        "gpu",
        "/",
    )
    for key in ("policy.family", "policy.action_parser", "policy.history_images"):
        assert resolved.agrees(without, key)
    assert not resolved.agrees(Settings({}, "box", "/"), "policy.action_parser")


@pytest.mark.parametrize(
    "key", ["bus.port=9000", "up.envs=3", "eval.episodes=1", "tune.epochs=1.0"]
)
def test_what_concerns_no_other_process_is_never_compared(run: Run, key: str) -> None:
    for role in ("env", "rollout", "train"):
        assert run.join(role, key) == []  # type: ignore[arg-type]


def test_an_env_of_a_folder_of_its_own_joins_and_a_trainer_does_not(
    run: Run, tmp_path: Path
) -> None:
    elsewhere = f"run.dir={tmp_path / 'elsewhere'}"
    assert run.join("env", elsewhere) == []
    with pytest.raises(
        ConfigError, match=r"^run\.dir is .*checkpoints would belong to another run"
    ):
        run.join("train", elsewhere)
    assert run.join("train", elsewhere, host="another") == []


def test_settings_that_are_none_are_not_kept(run: Run) -> None:
    here = {"run.dir": str(run.path), "no.key": 3}
    for lr in ("much", float("nan"), []):
        with pytest.raises(
            ProtocolError, match=r"JoinRequest\.settings of train: train\.lr: Input"
        ):
            run.join("train", settings={**here, "train.lr": lr})
    assert run.join("train", settings=here) == []
    assert run.processes == {}
    assert run.settings.notes(["train"]) == []


def test_the_value_of_an_optional_section_that_one_process_unsets_is_kept_as_unset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    run = Run(tmp_path, ("env.judge.model=a", "env.judge.url=http://127.0.0.1:1/v1"))
    run.join("env")
    assert read_run(tmp_path).env.judge is None
    run.join("env", "env.judge.model=b", "env.judge.url=http://127.0.0.1:1/v1")
    judge = read_run(tmp_path).env.judge
    assert judge is not None
    assert judge.model == "b"


async def test_the_whole_of_it_over_the_wire(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    config, fewer, other = (
        default_config([f"run.dir={path}", *each])
        for each in ([], ["env.slots=3"], ["data.group_size=4"])
    )
    save_config(config)
    stop = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S):
        data = asyncio.create_task(service.run(config, stop))
        with pytest.raises(
            ConfigError, match=r"^dart env does not read data\.group_size; dart data"
        ):
            await env_worker.run(other, "env-1", 1, asyncio.Event())  # which it sets
        env = asyncio.create_task(env_worker.run(fewer, "env-0", 3, stop))
        async with Requester(Endpoints(path).address(DATA)) as requester:

            async def settings() -> list[str]:
                reply = await requester.request(StatusRequest(), PATIENCE_S)
                assert isinstance(reply, StatusReply)
                seen = Snapshot.model_validate(reply.snapshot)
                assert not any("env.slots" in line for line in seen.warnings)
                return seen.settings

            while not (shown := await settings()):  # noqa: ASYNC110 - a reply has no event
                await asyncio.sleep(0.05)
        stop.set()
        await asyncio.gather(data, env)
    line = "env-0 was started with env.slots = 3, dart data with 16, which does not use it"
    assert shown == [line]
    assert read_run(path).env.slots == 3
    with open_reader(path) as reader:
        assert json.loads(reader.run().config)["env"]["slots"] == 3
