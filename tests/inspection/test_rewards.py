"""Rewards between 0 and 1, and tasks that break, as the verbs and the viewer's pages show them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dart_cli.data.store.open import open_reader, open_store
from tests.data.parts import ask_lease, make_ledger, one_task, step_record, trajectory_end
from tests.inspection.parts import events_text, run
from tests.view.parts import serving


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One group: a failure of reward 0.4 with a milestone, a pass, and six that broke."""
    config = one_task(tmp_path_factory.mktemp("runs") / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for number in range(8):
            name = ask_lease(ledger, 0).trajectory_id
            for step in range(2):
                milestone = {"reward": 0.25} if number == step == 0 else {}
                ledger.step(step_record(name, step).model_copy(update=milestone))
            end = trajectory_end(name, 2, "fail" if number == 0 else "pass")
            if number == 0:
                end = end.model_copy(update={"reward": 0.4})
            elif number > 1:
                end = trajectory_end(name, 2, "invalid", "environment")
            ledger.end(end)
        store.commit()
    return config.run.dir


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What `dart data ARGUMENTS` prints."""
    assert run(*arguments) == 0
    return capsys.readouterr().out


def test_the_verbs_tell_a_reward_that_does_not_follow_from_the_outcome(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "g000001-00"
    rows = map(json.loads, told(capsys, "ls", run_dir, "--json").splitlines())
    by_id = {row["id"]: row["reward"] for row in rows}
    assert (by_id[name], by_id["g000001-01"], by_id["g000001-02"]) == (0.4, 1.0, None)
    shown = json.loads(told(capsys, "show", name, "--run", run_dir, "--json"))
    assert [step["reward"] for step in shown["trajectory_steps"]] == [0.25, None]
    assert "fail (reward 0.4) after 2 steps" in told(capsys, "show", name, "--run", run_dir)
    with open_reader(run_dir) as reader:
        assert "fail (reward 0.4) after 2 steps" in events_text(reader, name)
        assert "pass after 2 steps" in events_text(reader, "g000001-01")


def test_stats_tell_the_mean_reward_and_which_task_breaks_with_the_cure(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [fared] = json.loads(told(capsys, "stats", run_dir, "--json"))["tasks"].values()
    assert (fared["success"], fared["mean_reward"]) == (0.5, pytest.approx(0.7))
    assert (fared["verdicts"]["invalid"], fared["invalid_after_action"]) == (6, 6)
    printed = told(capsys, "stats", run_dir)
    assert "6 of 8 episodes of" in printed
    assert "6 of them after an action" in printed
    assert "ActionCausedError" in printed


def test_the_pages_show_rewards_beside_verdicts(run_dir: Path) -> None:
    with serving(run_dir) as server:
        assert "fail (reward 0.4)" in server.page("/trajectories")
        page = server.page("/trajectories/g000001-00")
        assert "fail (reward 0.4)" in page
        assert "reward 0.25" in page
        assert "mean reward" in server.page("/tasks")
        assert "(reward" not in server.page("/trajectories/g000001-01")
