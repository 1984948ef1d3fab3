"""`dart doctor CONFIG` and `--dry-run`: the plan of a configuration against a host."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.hardware_tables import split
from bus.errors import ConfigError
from dart_cli.config import devices
from dart_cli.config.load import load_config
from dart_cli.config.model_folder import CLASSES_CURE
from dart_cli.config.rules import Finding
from dart_cli.config.rules.check import find_mistakes
from dart_cli.config.schema import Config, UpConfig
from dart_cli.doctor import plan_findings as planned
from dart_cli.doctor.plan import H100, GpuKind
from dart_cli.doctor.plan_findings import PlanOnHost
from tests.config.model_parts import change_json, write_model
from tests.doctor.parts import doctor, worst
from tests.doctor.seven_b import config_of, write_seven_b

ROOT = Path(__file__).parents[2]
EVICT = ["policy.history_images=3", "policy.history_images_most=7"]


@pytest.fixture
def seven_b(tmp_path: Path) -> Path:
    return write_seven_b(tmp_path / "7b")


def host(
    monkeypatch: pytest.MonkeyPatch, *gpus: GpuKind, memory: int = 10**13, disk: int = 10**14
) -> None:
    """Simulate a host with these GPUs, whose disks and shared memory have `disk` bytes free."""
    monkeypatch.setattr(planned, "gpu_kinds", lambda: list(gpus))
    monkeypatch.setattr(planned, "main_memory", lambda: (memory, memory))
    usage = type("Usage", (), {"free": disk, "used": 10**9})
    monkeypatch.setattr(planned.shutil, "disk_usage", lambda _: usage)


def made(config: Config, steps: int | None = None) -> PlanOnHost:
    result = planned.plan_on_host(config, steps)
    assert result is not None
    return result


def about(findings: list[Finding], subject: str) -> Finding:
    [finding] = [each for each in findings if each.text.startswith(f"{subject}: ")]
    return finding


# --- verdicts ------------------------------------------------------------------------------


def test_doctor_refuses_what_cannot_fit_with_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "model")
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/run"\n[model]\npath = "{folder}"\n')
    monkeypatch.setattr(planned, "main_memory", lambda: (2**20, 2**20))
    monkeypatch.setattr(planned, "gpu_kinds", list)
    assert doctor(path, "--set", "rollout.device=cpu", "--set", "train.device=cpu") == 2
    assert "does not fit: trainer and engines need" in capsys.readouterr().out


def test_a_line_that_does_not_fit_is_an_error_and_the_others_are_ok(
    seven_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch, *[H100] * 8)
    config = config_of(model={"path": str(seven_b)}, train={"ranks": 1})
    findings = list(planned.plan(config))
    trainer = about(findings, "trainer")
    assert trainer.level == "error"
    assert trainer.text.startswith("trainer: does not fit: the trainer needs ")
    assert "masters, gradients, moments" in trainer.text  # its line, in the same finding
    assert trainer.cure == "set train.ranks = 3"
    assert {each.level for each in findings if each != trainer} == {"ok"}
    assert {about(findings, each).level for each in ("engine", "host", "disk")} == {"ok"}


def test_a_full_disk_is_refused_and_little_shared_memory_is_a_warning(
    seven_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch, *[H100] * 8, disk=60 * 10**9)
    findings = list(planned.plan(config_of(model={"path": str(seven_b)})))
    disk, main = about(findings, "disk"), about(findings, "host")
    assert disk.level == "error"
    assert "274.2 GB for checkpoints" in disk.text
    assert "choose another run.dir" in disk.cure
    assert main.level == "warning"
    assert "60.0 GB are free; they are written to run.dir" in main.text
    assert "--shm-size=84g" in main.cure


def test_what_a_run_holds_already_is_room_for_it(
    tmp_path: Path, seven_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch, *[H100] * 8, disk=1000)
    config = config_of(model={"path": str(seven_b)}, run={"dir": tmp_path / "run"})
    assert made(config).room.disk == 1000
    (tmp_path / "run" / "checkpoints" / "u1").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "u1" / "a.safetensors").write_bytes(bytes(500))
    assert made(config).room.disk == 1500


# --- roles ---------------------------------------------------------------------------------


def test_a_role_is_refused_for_its_own_need_alone(
    seven_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch, *[H100] * 8)
    large_trainer = config_of(model={"path": str(seven_b)}, train={"ranks": 1})
    small_engine = config_of(
        model={"path": str(seven_b)}, vllm={"max_model_len": 4096}, train={"pack_tokens": 512}
    )
    for role, refused in ((None, True), ("train", True), ("rollout", False)):
        assert _is_refused(large_trainer, role) == refused
    for role, refused in ((None, True), ("train", False), ("rollout", True)):
        assert _is_refused(small_engine, role) == refused
    lines = dict(planned.refuse_misfit(large_trainer, "rollout"))
    assert "engine" in lines
    assert not {"trainer", "pack", "disk"} & lines.keys()


def _is_refused(config: Config, role: Any) -> bool:
    try:
        list(planned.refuse_misfit(config, role))
    except ConfigError:
        return True
    return False


def test_a_dry_run_refuses_it_in_one_line(seven_b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, *[H100] * 8)
    config = config_of(model={"path": str(seven_b)}, train={"ranks": 1})
    with pytest.raises(ConfigError, match=r"does not fit: the trainer needs .*; set train.ranks"):
        list(planned.refuse_misfit(config))


def test_gpus_that_are_not_here_are_found() -> None:
    gpus = UpConfig(train_gpus=[0, 1], rollout_gpus=[2, 8, 9])
    [finding] = planned.absent_gpus(gpus, 8)
    assert finding.text == "up.rollout_gpus names GPU 8, 9, nvidia-smi lists 0 to 7"
    assert not list(planned.absent_gpus(UpConfig(), 0))


def test_more_ranks_than_gpus_do_not_fit_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_host_gpus", lambda: 4)
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/run"\n[train]\nranks = 8\ndevice = "cuda"\n')
    assert doctor(path) == 2
    assert "= 8 but 4 GPUs are visible" in capsys.readouterr().out


# --- what it is made of --------------------------------------------------------------------


def test_a_plan_needs_no_weights_but_a_model(
    tmp_path: Path, seven_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch)
    findings = list(planned.plan(config_of(model={"path": str(seven_b)}, up={"rollout_gpus": []})))
    assert worst(findings).level == "ok"
    assert not list(planned.plan(Config()))  # a shipped model


def test_a_model_that_is_not_here_is_planned_by_its_published_shape(
    seven_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch, *[H100] * 8)
    there, absent = (
        config_of(model={"path": path}) for path in (str(seven_b), "models/UI-TARS-1.5-7B")
    )
    lines = made(absent).lines(absent, None)
    shape = "the published shape of UI-TARS-1.5-7B, as models/UI-TARS-1.5-7B is not here; "
    assert lines["plan for"].startswith(shape)
    of_folder = made(there).lines(there, None)
    assert lines | {"plan for": lines["plan for"].removeprefix(shape)} == of_folder


@pytest.mark.parametrize(
    ("path", "text", "cure"),
    [
        ("models/mine", "its name shows no family whose shape is published", "hf download REPO"),
        ("models/Qwen2.5-VL-3B-Instruct", "has another size", "hf download REPO"),
        (
            "models/OpenCUA-7B",
            "is of the family opencua, whose class opencua dart does not load",
            "take a checkpoint of class qwen2_vl (",
        ),
    ],
)
def test_without_a_shape_a_plan_says_what_it_needs(
    path: str, text: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch)
    [finding] = planned.plan(config_of(model={"path": path}, up={"rollout_gpus": []}))
    assert (finding.subject, finding.level) == ("plan", "warning")
    assert text in finding.text
    assert cure in finding.cure
    assert ("hf download" in finding.cure) == ("hf download" in cure)


def test_a_folder_that_cannot_be_loaded_is_told_once(
    seven_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch)
    change_json(seven_b, "config.json", model_type="gemma3")
    config = config_of(model={"path": str(seven_b)}, up={"rollout_gpus": []})
    assert not list(planned.plan(config))
    [finding] = [each for each in find_mistakes(config) if each.subject == "model.path"]
    assert "model_type is gemma3, which dart does not load" in finding.text
    assert finding.cure == CLASSES_CURE


@pytest.mark.parametrize(
    ("size", "told"),
    [
        ("0x0", "of 1 to 16384 pixels, got 0x0"),
        ("99999x99999", "got 99999x99999"),
        ("-5x100", "got -5x100"),
        ([0, 7], "got 0x7"),
        ("5000x1", "too long a strip"),
    ],
)
def test_a_screen_that_is_none_is_one_error_with_exit_code_2(
    size: Any, told: str, seven_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch, *[H100] * 8)
    config = config_of(model={"path": str(seven_b)}, env={"options": {"size": size}})
    [finding] = planned.plan(config)
    assert (finding.subject, finding.level) == ("plan", "error")  # exit code 2, see examine.py
    assert "env.options.size" in finding.text
    assert told in finding.text
    with pytest.raises(ConfigError, match=r"^env\.options\.size"):
        list(planned.refuse_misfit(config, "rollout"))


@pytest.mark.parametrize(
    ("suite", "options", "screen"),
    [
        ("mini", {}, (168, 168)),
        ("desk", {}, (448, 336)),
        ("mini", {"size": "1280x720"}, (1280, 720)),
        ("mini", {"size": [640, 480]}, (640, 480)),
        ("osworld", {}, (1920, 1080)),
    ],
)
def test_screens_are_those_of_the_options_or_of_the_suite(
    suite: str,
    options: dict[str, Any],
    screen: tuple[int, int],
    seven_b: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host(monkeypatch)
    config = config_of(model={"path": str(seven_b)}, env={"suite": suite, "options": options})
    assert made(config).plan.screen == screen


def test_steps_are_the_tasks_or_those_that_are_asked_for(
    seven_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch)
    config = config_of(model={"path": str(seven_b)}, env={"tasks": ["mini/click", "mini/delete"]})
    result = made(config)
    assert 1 < result.plan.form.steps < 10
    assert "(the tasks' limits, on average)" in result.lines(config, None)["plan for"]
    request = made(config, 30)
    assert request.plan.form.steps == 30
    assert "episodes of 30 steps (--steps)" in request.lines(config, None)["plan for"]


def test_steps_need_a_run(seven_b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, output in (
        (["--steps", "0"], "greater than or equal to 1"),
        (["--steps", "3"], "--steps needs a run; add its TOML file"),
        ([seven_b, "--steps", "3"], "--steps plans the run of a TOML file"),
    ):
        assert doctor(*arguments) == 2
        assert output in " ".join(capsys.readouterr().err.split())


# --- the comments of shipped configurations ------------------------------------------------


@pytest.mark.parametrize(
    ("name", "history"),
    [
        *product(("ui-tars-7b", "osworld"), ("slide", "evict")),
        ("qwen3.5-9b", "slide"),  # these plan with published shapes
        ("qwen3.5-4b-27b", "slide"),
    ],
)
def test_comments_have_the_figures_that_are_printed(
    name: str, history: str, seven_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch, *[H100] * 8)
    path = ROOT / "configs" / f"{name}.toml"
    text = " ".join(path.read_text(encoding="utf-8").replace("#", " ").split())
    given = [] if name.startswith("qwen") else [f"model.path={seven_b}"]
    given += EVICT if history == "evict" else []
    config = load_config(path, given)
    lines = made(config, 30).lines(config, None)
    output = split(config, made(config, 30).plan)
    printed = [output.partition(" (")[0]]
    if history == "slide":
        printed += re.findall(r"room for [\d.]+ prompts", lines["engine"])
        printed += re.findall(r"keeps [\d.]+ days", output)
        printed += re.findall(r"each ([\d.]+ GB)", lines["trainer"])
        assert len(printed) == 4
    long = made(config, 100).lines(config, None)["engine"]
    printed += re.findall(r"\d+ past turns of up to \d+", long)
    missing = [each for each in printed if each not in text]
    assert not missing
    assert f"dart doctor configs/{name}.toml --steps 30" in text
