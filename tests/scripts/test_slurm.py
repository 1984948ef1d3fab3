"""scripts/slurm.sh asks for the right steps; its srun and scontrol only write down what they are given."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "slurm.sh"
ADDRESS = "10.0.0.1"
SRUN = """#!/bin/sh
case "$*" in
    *getent*) echo "{address} STREAM n1"; exit ;;
esac
printf '%s\\0' "$@" > "$(mktemp {folder}/step-XXXXXX)"
case "$*" in
    *" train "*) exit {code} ;;
esac
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The variables of a job of four nodes with four GPUs each."""
    tools = tmp_path / "tools"
    (tmp_path / "steps").mkdir()
    tools.mkdir()
    programs = {
        "scontrol": '#!/bin/sh\nprintf "n%s\\n" 1 2 3 4\n',
        "srun": SRUN.format(address=ADDRESS, folder=tmp_path / "steps", code=3),
        "python3": f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n',
    }
    for name, text in programs.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "c.toml").write_text(f'[run]\ndir = "{tmp_path}/a run"\n[up]\nenvs = 3\n')
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DART_VENV": str(tmp_path / "no venv"),
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_ID": "77",
    }


def script(job: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=os.environ | job,
    )


def roles(steps: Iterable[list[str]]) -> list[str]:
    """`n2 rollout --worker rollout-1-0`, ...: node, role and worker of each step, sorted."""
    told = []
    for words in steps:
        [node] = [word.partition("=")[2] for word in words if word.startswith("--nodelist=")]
        role = words[len(words) - 1 - words[::-1].index("dart_cli") + 1]
        worker = words[words.index("--worker") + 1] if "--worker" in words else ""
        told.append(f"{node} {role} {worker}".strip())
    return sorted(told)


def test_it_is_bash_and_shellcheck_has_nothing_to_say() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", SCRIPT], check=True)


def test_each_node_of_a_job_runs_its_part_and_the_job_ends_as_the_trainer(
    job: dict[str, str], tmp_path: Path
) -> None:
    ended = script(
        job, tmp_path / "c.toml", "--set", "rollout.engine=vllm", "--set", "vllm.tensor_parallel=2"
    )
    assert ended.returncode == 3, ended.stderr
    steps = [path.read_text().split("\0")[:-1] for path in (tmp_path / "steps").iterdir()]
    assert roles(steps) == [
        "n1 data",
        "n1 train",
        *(
            f"n{node} {role} {role}-{node - 1}-{index}"
            for node in (2, 3, 4)
            for role, number in (("env", 1), ("rollout", 2))
            for index in range(number)
        ),
    ]
    keys = tmp_path / "a run" / "keys"
    assert (keys / "curve.json").stat().st_mode & 0o777 == 0o600
    for words in steps:
        for given in (
            f'bus.host="{ADDRESS}"',
            f"bus.keys={keys}",
            "up.rollouts=6",  # by which each sizes its cache of screens
            "up.envs=3",
            f"weights.directory={keys.parent / 'weights'}",
            "vllm.tensor_parallel=2",
        ):
            assert words[words.index(given) - 1] == "--set"
        assert ("train.ranks=4" in words) == ("train" in words)
    visible = {
        word for words in steps if "rollout" in words for word in words if "CUDA_VISIBLE" in word
    }
    assert visible == {"CUDA_VISIBLE_DEVICES=0,1", "CUDA_VISIBLE_DEVICES=2,3"}


def test_a_trainer_on_two_nodes_is_torchruns_and_a_dry_run_starts_nothing(
    job: dict[str, str], tmp_path: Path
) -> None:
    ended = script(
        job, "--train-nodes", 2, "--dry-run", tmp_path / "c.toml", "--set", "weights.channel=nccl"
    )
    assert ended.returncode == 0, ended.stderr
    steps = [shlex.split(line) for line in ended.stdout.splitlines()]
    train = steps[-1]
    assert "--nodelist=n1,n2" in train
    assert shlex.join(["--nnodes", "2", "--nproc-per-node", "4"]) in shlex.join(train)
    assert train[train.index("--rdzv-id") + 1] == "77"
    assert "train.ranks=1" in train
    assert not any(word.startswith("weights.directory") for words in steps for word in words)
    assert {told.partition(" ")[0] for told in roles(steps[1:-1])} == {"n3", "n4"}
    assert not any((tmp_path / "steps").iterdir())
    assert not (tmp_path / "a run").exists()


def test_the_job_ends_when_data_fails(job: dict[str, str], tmp_path: Path) -> None:
    """Else the trainer waits for it until the job's time is over."""
    srun = """#!/bin/sh
case "$*" in
    *getent*) echo "10.0.0.1 STREAM n1" ;;
    *" data "*) exit 7 ;;
    *" train "*) exec sleep 600 ;;
esac
"""
    (tmp_path / "tools" / "srun").write_text(srun)
    ended = script(job, tmp_path / "c.toml")
    assert ended.returncode == 7
    assert "dart data ended with 7" in ended.stderr


def test_a_signal_ends_every_step(job: dict[str, str], tmp_path: Path) -> None:
    """Slurm sends it to the script alone; each step notes that it got one too."""
    srun = f"""#!/bin/sh
case "$*" in
    *getent*) echo "10.0.0.1 STREAM n1"; exit ;;
esac
trap 'kill $!; mktemp {tmp_path}/steps/ended-XXXXXX; exit 0' TERM
mktemp {tmp_path}/steps/began-XXXXXX
sleep 600 &
wait
"""
    (tmp_path / "tools" / "srun").write_text(srun)
    steps = tmp_path / "steps"
    with subprocess.Popen([SCRIPT, tmp_path / "c.toml"], env=os.environ | job) as running:
        try:
            wait_until(lambda: len(list(steps.glob("began-*"))) == 2 + 3 + 12, "all steps")
            running.terminate()
            assert running.wait(PATIENCE_S) == 143
        finally:
            running.kill()
    assert len(list(steps.glob("ended-*"))) == 2 + 3 + 12


def test_help_is_no_mistake(job: dict[str, str]) -> None:
    ended = script(job, "--help")
    assert ended.returncode == 0
    assert "--train-nodes N" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--train-nodes", "4", "c.toml"], "4 nodes and --train-nodes 4: at least one more"),
        (["none.toml"], "no such file"),
        (["c.toml", "--force"], "after CONFIG only --set KEY=VALUE"),
        (["c.toml", "--set", "train.lrr=1"], "did you mean train.lr?"),
        (["--gpus", "two", "c.toml"], "two: want a whole number"),
        (["--port"], "--port: want a whole number after it"),
        (["--nodes", "4", "c.toml"], "--train-nodes N"),
    ],
)
def test_mistakes_end_it_before_anything_starts(
    job: dict[str, str], tmp_path: Path, arguments: list[str], said: str
) -> None:
    ended = script(
        job, *(tmp_path / word if word.endswith("c.toml") else word for word in arguments)
    )
    assert ended.returncode == 2
    assert said in ended.stderr
    assert not any((tmp_path / "steps").iterdir())
