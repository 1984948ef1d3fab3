"""`dart data show` prints each step of a trajectory, and draws its screens."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from dart_cli.data.store.open import open_store
from dart_cli.evaluation.marks import action_words
from dart_cli.inspection.run_lookup import find_subject
from dart_cli.inspection.trajectories import read_trajectory
from tests.data.parts import (
    DRAG,
    a_batch,
    ask_lease,
    make_ledger,
    next_batch,
    one_task,
    play,
    play_pointing,
    pointing_config,
    small_config,
    step_record,
    trajectory_end,
)
from tests.inspection.parts import PlayedRun, run


def test_show_prints_each_step(run_content: PlayedRun, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{run_content.mixed}-00"
    assert run("show", name, "--run", run_content.config.run.dir, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    steps = run_content.store.steps(name)
    assert [step["text"] for step in result["trajectory_steps"]] == [step.text for step in steps]
    assert [step["logprob"] for step in result["trajectory_steps"]] == pytest.approx(
        [sum(step.sampled.behaviour_logprobs) / 3 for step in steps]
    )
    assert (result["outcome"], result["state"], result["pool"]["source"]) == (
        "pass",
        "trained",
        "online",
    )
    assert run("show", name, "--run", run_content.config.run.dir) == 0
    page = capsys.readouterr().out
    assert "click 1,2" in page
    assert "pass after 3 steps" in page


def test_show_prints_what_the_policy_read_beside_the_screenshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path / "run")
    told = "Terminal:\n[bold]$ ls\x1b[31m\n" + "\n".join(f"file {n}" for n in range(20))
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        name = ask_lease(ledger, 0).trajectory_id
        ledger.step(step_record(name, 0).model_copy(update={"observed_text": told}))
    assert run("show", name, "--run", config.run.dir, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [step["observed_text"] for step in result["trajectory_steps"]] == [told]
    assert run("show", name, "--run", config.run.dir) == 0
    page = capsys.readouterr().out
    assert f"step 0, beside the screenshot ({len(told)} characters):" in page
    assert "[bold]$ ls?[31m" in page
    assert "10 more lines: --json" in page
    assert "file 19" not in page


def test_a_patch_stands_beside_its_token_with_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = pointing_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        name = play_pointing(ledger)[0]
        a_batch(next_batch(ledger, 0))
    assert run("show", name, "--run", config.run.dir, "--json") == 0
    [step] = json.loads(capsys.readouterr().out)["trajectory_steps"]
    first = {"token": 3, "patch": 5, "row": 1, "column": 2, "logprob": -3.5, "entropy": 4.0}
    assert step["patches"][0] == first
    assert [each["patch"] for each in step["patches"]] == [5, 0]
    assert step["entropy"] == pytest.approx(sum(DRAG.entropies) / 7), "a pad is no decision"
    assert step["logprob"] == pytest.approx(sum(DRAG.behaviour_logprobs) / 7)
    assert run("show", name, "--run", config.run.dir) == 0
    page = capsys.readouterr().out
    assert "step 0, token 3: patch 5 (row 1, column 2), log-prob -3.500, entropy 4.000" in page
    assert run("why", name, "--run", config.run.dir, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    [event] = [each for each in told["story"] if each["text"].startswith("step 0 is trained on")]
    assert "token 3: patch 5 (row 1, column 2), log-prob -3.500, entropy 4.000" in event["text"]
    assert "token 7: patch 0 (" in event["text"]
    with open_store(config.run.dir) as store:
        [read] = read_trajectory(store, find_subject(store, name)).steps
    assert [span.entropy for span in read.spans] == pytest.approx([sum(DRAG.entropies) / 7])


def test_show_and_stats_tell_what_the_baselines_expect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = one_task(tmp_path / "run", group_size=1, advantage="step_baseline")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        name = play(ledger, 0, "fail").trajectory_id
        a_batch(next_batch(ledger, 0))
    assert run("show", name, "--run", config.run.dir, "--json") == 0
    steps = json.loads(capsys.readouterr().out)["trajectory_steps"]
    assert [[use["baseline"] for use in step["uses"]] for step in steps] == [[0.5], [0.5]]
    assert run("show", name, "--run", config.run.dir) == 0
    assert "(expected" in capsys.readouterr().out
    assert run("stats", config.run.dir, "--json") == 0
    [expected] = json.loads(capsys.readouterr().out)["expected"].values()
    assert expected == pytest.approx([0.475 / 1.95] * 3)
    assert run("stats", config.run.dir) == 0
    assert "expected" in capsys.readouterr().out


def test_actions_are_short_words() -> None:
    assert action_words({"kind": "click", "x": 3, "y": 4, "button": "left"}) == "click 3,4"
    assert action_words({"kind": "click", "x": 3, "y": 4, "button": "right"}) == (
        "click 3,4 button right"
    )
    held = {"kind": "click", "x": 3, "y": 4, "button": "left", "modifiers": ["ctrl", "shift"]}
    assert action_words(held) == "ctrl+shift+click 3,4"
    assert action_words({"kind": "mouse_up", "button": "left"}) == "mouse_up"
    assert action_words({"kind": "type", "text": "a b"}) == "type text a b"
    assert action_words({"kind": "done"}) == "done"


def test_show_draws_every_screen_of_a_trajectory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        lease = ask_lease(ledger, 0)
        for number, colour in enumerate(("red", "green", "blue")):
            file = io.BytesIO()
            Image.new("RGB", (168, 168), colour).save(file, "PNG")
            ledger.step(step_record(lease.trajectory_id, number, image=file.getvalue()))
        end = trajectory_end(lease.trajectory_id, 3)
        ledger.end(end.model_copy(update={"screenshot": file.getvalue()}))
        store.commit()
        film = tmp_path / "film.png"
        assert run("show", lease.trajectory_id, "--run", config.run.dir, "--film", film) == 0
        with Image.open(film) as drawn:
            colours = {colour for _, colour in drawn.convert("RGB").getcolors(2**24) or []}
        assert {(255, 0, 0), (0, 128, 0), (0, 0, 255)} <= colours
        moving = tmp_path / "film.gif"
        assert run("show", lease.trajectory_id, "--run", config.run.dir, "--film", moving) == 0
        with Image.open(moving) as replay:
            centres = []
            for number in range(replay.n_frames):  # type: ignore[attr-defined]
                replay.seek(number)
                assert replay.info["duration"] >= 1000, "slow enough to follow"
                picture = replay.convert("RGB")
                centres.append(picture.getpixel((picture.width // 4, picture.height // 2)))
        assert centres == [(255, 0, 0), (0, 128, 0), (0, 0, 255), (0, 0, 255)]
        video = tmp_path / "film.mp4"
        assert run("show", lease.trajectory_id, "--run", config.run.dir, "--film", video) == 2
        assert "ends in .png (a strip) or .gif (moving)" in capsys.readouterr().err
        assert not video.exists()
        store.remove_screenshots(10**6, 10**6)
        store.commit()
        assert run("show", lease.trajectory_id, "--run", config.run.dir, "--film", film) == 2
        assert "data.max_gb" in capsys.readouterr().err
