"""Which GPUs the processes of `dart up` see where CUDA_VISIBLE_DEVICES is set, and which lists are refused."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from dart_cli.cli.main import main
from dart_cli.config.load import load_config
from dart_cli.runtime.commands import commands_of
from dart_cli.runtime.logs import log_dir
from dart_cli.runtime.supervisor import Supervisor
from tests.simulated import SLOW
from tests.waiting import until

EIGHT = "0,1,2,3,4,5,6,7"
UUIDS = "GPU-aa,GPU-bb,GPU-cc,GPU-dd"
SLICES = "MIG-aa,MIG-bb,MIG-cc,MIG-dd"


@pytest.fixture
def config_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run without a model that names a GPU for each of its three processes."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setattr("dart_cli.config.devices._host_gpus", lambda: 0)
    path = tmp_path / "c.toml"
    path.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[rollout]\nengine = "scripted"\n[train]\nlearner = "{SLOW}"\n'
        "[up]\nrollouts = 2\ntrain_gpus = [3]\nrollout_gpus = [1, 2]\n"
    )
    return path


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (EIGHT, {"train": "3", "rollout-0": "1", "rollout-1": "2"}),
        ("4,5,6,7", {"rollout-0": "5", "rollout-1": "6"}),
        (UUIDS, {"rollout-0": "GPU-bb", "rollout-1": "GPU-cc"}),
        (SLICES, {"rollout-0": "MIG-bb", "rollout-1": "MIG-cc"}),
    ],
)
async def test_each_process_of_a_run_sees_its_own_gpu(
    config_path: Path, visible: str, seen: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = load_config(config_path)
    commands = commands_of(config, [str(config_path)])
    logs = {name: log_dir(config.run.dir) / f"{name}.log" for name in seen}
    supervisor = Supervisor(
        {name: commands[name] for name in seen},
        leaders=list(seen),
        restarts=0,
        log_file=config_path.with_name("up.log"),
        notice=print,
    )

    def told() -> dict[str, str]:
        """Return what each log says of the GPU."""
        found = {
            name: re.search(r"it sees GPU (.*)\n", path.read_text()) if path.exists() else None
            for name, path in logs.items()
        }
        return {name: match[1] for name, match in found.items() if match}

    running = asyncio.create_task(supervisor.run(asyncio.Event()))
    try:
        await until(lambda: told().keys() == seen.keys() or running.done())
    finally:
        supervisor.kill()
        await running
    assert told() == seen


@pytest.mark.parametrize(
    ("visible", "sees"),
    [
        (
            "4,5",
            "of which CUDA sees 2 GPUs; name places (0 to 1), list more GPUs there, or unset it",
        ),
        ("4,5,six,7", "of which CUDA sees 2 GPUs; name places (0 to 1)"),
        ("4,-1,6,7", "of which CUDA sees 1 GPU; name places (0)"),
        ("4,5,6,4", "and no GPU is visible; list GPUs there, or unset it"),
        ("", "and no GPU is visible; list GPUs there, or unset it"),
    ],
)
def test_too_few_gpus_are_refused_alike_before_anything_starts(
    config_path: Path,
    visible: str,
    sees: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("dart_cli.doctor.machine.ask_torch", lambda: "not asked here")

    def refused(*arguments: str) -> str:
        """Return what is printed."""
        with pytest.raises(SystemExit) as ended:
            main([*arguments, str(config_path)])
        assert ended.value.code == 2, arguments
        out, err = capsys.readouterr()
        return out or err

    findings = json.loads(refused("doctor", "--json"))["findings"]
    [found] = [each for each in findings if each["subject"].startswith("up.")]
    text = f"{found['subject']} {found['text']}; {found['cure']}"
    listed = f"CUDA_VISIBLE_DEVICES={visible or repr('')}"
    assert text.startswith(f"up.train_gpus = [3] names place 3 of {listed}, {sees}")
    for line in (refused("up", "--dry-run"), refused("up")):
        assert line.startswith(f"error: {text}")
        assert line.count("\n") == 1
    assert not load_config(config_path).run.dir.exists()


@pytest.mark.parametrize(
    ("verb", "changes", "own", "seen"),
    [
        ("train", [], {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("train", [], {"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
        ("train", [], {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}),
        ("train", ["--set", "train.device=cpu", "--set", "up.train_gpus=[]"], {}, {}),
        ("rollout", [], {}, {}),
        ("up", [], {}, {}),  # its children inherit what it has
    ],
)
def test_the_trainer_alone_lets_torch_extend_its_segments(
    config_path: Path,
    verb: str,
    changes: list[str],
    own: dict[str, str],
    seen: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # all are put back after the test
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    found: list[dict[str, str]] = []

    def look(*_: object, **__: object) -> int:
        found.append({k: v for k, v in os.environ.items() if k.endswith("ALLOC_CONF")})
        return 0

    monkeypatch.setattr("dart_cli.runtime.role.run_role", look)
    monkeypatch.setattr("dart_cli.cli.up.run_up", look)
    with pytest.raises(SystemExit):
        main([verb, str(config_path), *changes])
    assert found == [seen]
