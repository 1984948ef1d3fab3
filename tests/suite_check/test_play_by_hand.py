"""`dart env play`: a person, the solution or random clicks play, and a film of the episode is written."""

from __future__ import annotations

import io
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dart_cli.cli.main import main
from envs.contract.actions import Action
from envs.contract.base import Observation
from tests.env.unruly_suite import SCREEN, Unruly
from tests.env.unruly_suite import SUITE as UNRULY
from tests.stopping import signal_in


def run(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    typed: str = "",
) -> tuple[int, str, str]:
    """Run `dart env play ARGUMENTS`, and return (exit code, stdout, stderr)."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    with pytest.raises(SystemExit) as exit_:
        main(["env", "play", *arguments])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def test_a_solution_plays_and_its_film_shows_every_step_and_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "film.png"
    code, printed, _ = run(
        ["mini", "popup", "--seed", "7", "--solution", "--out", str(out)], capsys, monkeypatch
    )
    assert code == 0
    assert "2. click" in printed
    assert "pass: the goal is reached" in printed
    with Image.open(out) as film:
        assert film.width == 12 + 3 * (320 + 12)
        colours = {colour for _, colour in film.convert("RGB").getcolors(2**24) or []}
    assert (255, 20, 147) in colours, "where it clicked"
    assert (26, 127, 55) in colours, "passed"


def test_a_moving_film_has_one_picture_for_each_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "film.gif"
    code, _, _ = run(["desk", "login", "--solution", "--out", str(out)], capsys, monkeypatch)
    assert code == 0
    with Image.open(out) as film:
        assert film.n_frames == 6  # type: ignore[attr-defined]
        assert film.info["duration"] > 0


def test_a_person_types_and_mistakes_cost_no_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = "help\nlook\nclik(1,1)\n\nevaluate\nclick(160,160)\nnext\nnext\nclick(1,1)\n"
    code, printed, _ = run(["mini", "popup", "--seed", "7"], capsys, monkeypatch, typed)
    assert code == 0
    lines = printed.splitlines()
    assert any("drag(x,y,x,y,...)" in line for line in lines)
    assert sum("▀" in line for line in lines) > 10, "the screen in blocks"
    assert any(line.endswith("`help` lists the calls") and "clik" in line for line in lines)
    assert "fail: the goal is not reached" in lines
    assert lines[-1] == "pass: the goal is reached"
    assert sum(line[:2] in ("1.", "2.", "3.", "4.") for line in lines) == 3


def test_an_episode_is_judged_where_the_person_stops_typing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "film.png"
    code, printed, _ = run(["mini", "popup", "--out", str(out)], capsys, monkeypatch, "quit\n")
    assert code == 0
    assert "fail: the goal is not reached" in printed
    assert out.is_file()


@pytest.mark.parametrize(
    ("task", "player", "code", "said"),
    [
        (
            "step-raise",
            "--random",
            1,
            "invalid: play: step: ZeroDivisionError: a bug of the environment",
        ),
        ("reset-raise", "--random", 1, "error: play: reset: ZeroDivisionError"),
        ("reset-exit", "--random", 1, "error: play: reset: SystemExit: 3"),
        (
            "reset-none",
            "--random",
            1,
            "error: play: reset must return (observation, info), got None",
        ),
        (
            "step-none",
            "--random",
            1,
            "invalid: play: step must return (observation, reward, terminated, truncated, info), got None",
        ),
        (
            "evaluate-none",
            "--random",
            1,
            "invalid: play: evaluate must return a Verdict (envs.contract.base), got None",
        ),
        (
            "solve-none",
            "--solution",
            1,
            "invalid: play: oracle_action must return an action of envs.contract.actions, got None",
        ),
        ("true", "--random", 1, "invalid: unruly/true is true at reset"),
        ("infeasible", "--random", 0, "the policy did not say so"),
        ("well", "--solution", 0, "pass: "),
    ],
)
def test_verdicts_are_those_of_a_run(
    task: str,
    player: str,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, printed, error = run([UNRULY, task, player], capsys, monkeypatch)
    assert result == code
    assert said in printed + error


class Breaks(Unruly):
    """Sound at reset; `step` returns `seen`, or raises if that is None."""

    seen: Observation | None = None

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self.seen is None:
            raise ZeroDivisionError("a bug of the environment")
        return self.seen, *super().step(action)[1:]


@pytest.mark.parametrize("format_", ["png", "gif"])
@pytest.mark.parametrize(
    ("seen", "said"),
    [
        pytest.param(None, "play: step: ZeroDivisionError: a bug of the environment", id="raises"),
        pytest.param(
            replace(SCREEN, screenshot=b"xx"),
            "play: step: a screenshot of 2 bytes is no PNG, JPEG or WebP image",
            id="no-image",
        ),
        pytest.param(
            replace(SCREEN, screenshot=SCREEN.screenshot[:45]),
            "the screenshot cannot be decoded: ",
            id="cut-off",
        ),
    ],
)
def test_a_step_that_breaks_has_a_film_with_the_reason(
    seen: Observation | None,
    said: str,
    format_: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Breaks, "seen", seen)
    monkeypatch.setattr("dart_cli.env.async_env.make_env", lambda *_, **__: Breaks())
    out = tmp_path / f"film.{format_}"
    code, printed, error = run([UNRULY, "well", "--random", "--out", str(out)], capsys, monkeypatch)
    assert (code, error) == (1, "")
    assert f"invalid: {said}" in printed
    with Image.open(out) as film:
        film.load()


def test_a_first_screen_that_cannot_be_decoded_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = replace(SCREEN, screenshot=SCREEN.screenshot[:45])
    monkeypatch.setattr("tests.env.unruly_suite.SCREEN", cut)
    monkeypatch.setattr("dart_cli.env.async_env.make_env", lambda *_, **__: Unruly())
    code, _, error = run([UNRULY, "well", "--random"], capsys, monkeypatch)
    assert code == 1
    assert error.startswith("error: the screenshot cannot be decoded: ")
    assert error.count("\n") == 1


def test_stopped_while_a_step_hangs_it_says_so_and_keeps_the_film(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_in(monkeypatch, "play to step unruly/step-hang", signal.SIGTERM)
    out = tmp_path / "film.png"
    code, printed, text = run(
        [UNRULY, "step-hang", "--random", "--out", str(out)], capsys, monkeypatch
    )
    assert code == 143
    assert "stopped by SIGTERM; it had waited 0 s for play to step unruly/step-hang" in text
    assert "invalid: stopped" in printed
    with Image.open(out) as film:
        film.load()


def test_stopped_before_there_is_a_screen_it_ends_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_in(monkeypatch, "play to reset unruly/reset-hang", signal.SIGINT)
    assert run([UNRULY, "reset-hang", "--random"], capsys, monkeypatch)[:2] == (130, "")


def test_ctrl_c_at_the_prompt_ends_the_episode_which_is_judged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Prompt(io.StringIO):
        def readline(self, *_: Any) -> str:
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait()
            return ""

    monkeypatch.setattr("sys.stdin", Prompt())
    with pytest.raises(SystemExit) as ended:
        main(["env", "play", "mini", "popup"])
    assert ended.value.code in (0, None)
    assert capsys.readouterr().out.splitlines()[-1] == "fail: the goal is not reached"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mini", "poppup"], "no task 'poppup'; did you mean"),
        (["mini", "popup", "--solution", "--random"], "choose one"),
        (["mini", "popup", "--out", "film.mp4"], "want a film called .png or .gif"),
        (["mini", "popup", "--solution", "--out", "/no/such/film.png"], "there is no folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, _, error = run(arguments, capsys, monkeypatch)
    assert code == 2
    assert said in error
    assert error.count("\n") == 1
