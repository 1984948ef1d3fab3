"""A folder that cannot be written is refused at once: before torch is imported, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dart_cli.config.schema import Config
from dart_cli.data.store.open import open_store
from dart_cli.runtime.run_dir import save_config
from scripts.make_grounding_set import make_set
from tests.waiting import PATIENCE_S

COMMANDS = """
import contextlib, io, json, sys
from dart_cli.cli.main import main

for line in sys.stdin:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            main(json.loads(line))
    except SystemExit as end:
        code = end.code
    sys.__stdout__.write(json.dumps([code, told.getvalue(), "torch" in sys.modules]) + "\\n")
"""
VERBS = {
    "tune": "tune --data run --out OUT",
    "export": "export run OUT",
    "model add-pointer": "model add-pointer builtin:tiny OUT",
    "model verifier-rows": "model verifier-rows set/train OUT",
    "data export": "data export run OUT",
    "data collect": "data collect own.toml --out OUT",
    "data collect by a policy": "data collect own.toml --from policy --out OUT",
    "explore": "explore mini --task mini/popup --out OUT",
    "explore rows": "explore rows graph OUT",
    "explore tasks": "explore tasks graph OUT",
    "eval grounding": "eval grounding set/train --model builtin:tiny --out OUT",
}
FILLED = set(VERBS) - {"explore tasks"}
"""Verbs that leave a folder alone which holds something else."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without trajectories, a grounding set, and places where nothing can be written."""
    home = tmp_path_factory.mktemp("home")
    (home / "run").mkdir(mode=0o700)
    config = Config.model_validate({"run": {"dir": home / "run"}})
    save_config(config)
    with open_store(home / "run") as store:
        store.begin_run(0, config.model_dump_json(), [])
    make_set(home / "set", ["mini"], {"train": 3})
    (home / "own.toml").write_text(f'[run]\ndir = "{home}/other"\n[env]\ntasks = ["mini/popup"]\n')
    (home / "filled").mkdir()
    (home / "filled" / "photo.png").write_bytes(b"x")
    return home


@pytest.mark.parametrize(
    "place", ["filled", "filled/photo.png", "filled/photo.png/below", "/proc/x"]
)
def test_a_place_where_nothing_can_be_written_is_refused_before_torch_is_imported(
    home: Path, place: str
) -> None:
    verbs = [verb for verb in VERBS if place != "filled" or verb in FILLED]
    lines = [json.dumps(VERBS[verb].replace("OUT", place).split()) for verb in verbs]
    ended = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input="\n".join(lines),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    answers = map(json.loads, ended.stdout.splitlines())
    for verb, (code, told, has_torch) in zip(verbs, answers, strict=True):
        assert code == 2, (verb, told)
        assert place in told, verb
        assert not has_torch, (verb, told)
        assert told.count("\n") == 1, told
