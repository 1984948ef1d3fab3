"""Kept answers: a second start goes on, and answers of two settings are never one evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.errors import UserError
from dart_cli.grounding.benchmark import ANSWERS, AnswersFolder, Settings
from dart_cli.grounding.items import Answer

SETTINGS = Settings(
    set="screenspot",
    set_digest="s",
    items=2,
    malformed=0,
    model="models/a",
    model_digest="m",
    weights="",
    action_parser="compact",
    coordinates="thousandths",
    system_prompt="",
    template="{instruction}",
    part_order="image_first",
    min_pixels=1,
    max_pixels=2,
    resize_factor=28,
    max_tokens=16,
    candidates=1,
    temperature=0.0,
    seed=0,
    engine="transformers",
    dtype="float32",
)


def answer(name: str) -> Answer:
    return Answer(id=name, points=[(1.0, 2.0), None], texts=["click(1,2)", ""])


def test_answers_are_there_again_after_a_kill_in_a_line(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with AnswersFolder(folder, SETTINGS) as kept:
        kept.add(answer("x[0]"))
        assert (folder / ANSWERS).read_text().count("\n") == 1  # a kill from here on costs nothing
        kept.add(answer("x[1]"))
    with (folder / ANSWERS).open("ab") as file:
        file.write(answer("x[2]").model_dump_json()[:20].encode())
    with AnswersFolder(folder, SETTINGS) as kept:
        assert kept.answers == {name: answer(name) for name in ("x[0]", "x[1]")}
        kept.add(answer("x[2]"))
    with AnswersFolder(folder, SETTINGS) as kept:
        assert kept.of(["x[2]", "x[7]"]) == {"x[2]": answer("x[2]")}


def test_every_setting_that_answers_depend_on_keeps_evaluations_apart(tmp_path: Path) -> None:
    with AnswersFolder(tmp_path / "a", SETTINGS) as kept:
        kept.add(answer("x[0]"))
    told = {"model": "elsewhere/a", "items": 900, "malformed": 3, "verifier": "elsewhere/v"}
    moved = SETTINGS.model_copy(update=told)
    with AnswersFolder(tmp_path / "a", moved) as kept:
        assert kept.answers
    for name in Settings.model_fields:
        if name in told:
            continue
        before = getattr(SETTINGS, name)
        now = f"{before}x" if isinstance(before, str) else before + 1
        changed = SETTINGS.model_copy(update={name: now})
        with pytest.raises(UserError, match=rf"{name} was .* and is .*--fresh"):
            AnswersFolder(tmp_path / "a", changed)


def test_fresh_moves_the_older_one_aside(tmp_path: Path) -> None:
    with AnswersFolder(tmp_path / "a", SETTINGS) as kept:
        kept.add(answer("x[0]"))
    other = SETTINGS.model_copy(update={"candidates": 3})
    with AnswersFolder(tmp_path / "a", other, fresh=True) as kept:
        assert kept.answers == {}
        assert kept.moved is not None
        assert (kept.moved / ANSWERS).read_text().count("\n") == 1


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(UserError, match="is no evaluation of grounding"):
            AnswersFolder(tmp_path, SETTINGS, fresh=fresh)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    with AnswersFolder(tmp_path / "a", SETTINGS), pytest.raises(UserError, match="is in use"):
        AnswersFolder(tmp_path / "a", SETTINGS)
    with AnswersFolder(tmp_path / "a", SETTINGS):
        pass


def test_a_line_that_is_no_answer_is_named(tmp_path: Path) -> None:
    with AnswersFolder(tmp_path / "a", SETTINGS) as kept:
        kept.add(answer("x[0]"))
    with (tmp_path / "a" / ANSWERS).open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(UserError, match=r"answers\.jsonl line 2 cannot be read"):
        AnswersFolder(tmp_path / "a", SETTINGS)
