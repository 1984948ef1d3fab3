"""The pages of evaluations: what they show, of whom, and nothing else of the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dart_cli.evaluation.films import Film, FilmFrame, Films, films_dir, write_shot
from dart_cli.evaluation.leaderboard import as_markdown, row_of
from dart_cli.evaluation.results import (
    EvalSettings,
    Evaluation,
    ProtocolCheck,
    eval_dir,
    read_evaluation,
)
from dart_cli.evaluation.scores import METHOD, mode_score
from tests.evaluation.parts import episode
from tests.view.parts import Bones, Server, png, serving
from tests.view.test_hostile import BENIGN, HOSTILE


def keep(run_dir: Path, name: str, letters: str, word: str, attempts: int = 2) -> str:
    """An evaluation in which everything that others write is `word`; the name of a screenshot."""
    outcomes = {"p": "pass", "f": "fail", "i": "invalid"}
    rows = [
        episode(word, index // attempts, index % attempts, outcomes[each]).model_copy(
            update={"reason": word}
        )
        for index, each in enumerate(letters)
    ]
    found = Evaluation(
        schema_version=2,
        name=name,
        model=word,
        weights=word,
        policy_version=3,
        seed=0,
        wall_s=90.0,
        modes={"sampled": mode_score(rows, [word], [], attempts)},
        attempts=attempts,
        settings=EvalSettings(
            suite=word, suite_digest="", model_digest="", weights_digest="", values={"key": word}
        ),
        protocol=ProtocolCheck(
            name="webarena",
            title=word,
            sources=[],
            deviations=[f"tasks 1, {word}"],
            left_to_model=[],
            uncertain=[word],
        ),
        interval_method=METHOD,
        finished_at=1.0,
        notes=[word],
        episodes=rows,
    )
    folder = films_dir(run_dir, name)
    folder.mkdir(parents=True)
    shot = write_shot(folder, png())
    frames = [
        FilmFrame(screenshot=shot, text=word, action={"kind": "drag", "path": [[1, 2], [5, 6]]})
    ]
    film = Film(
        task_id=word,
        seed=0,
        instruction=word,
        outcome="fail",
        reason=word,
        frames=frames,
        last=shot,
    )
    (folder / "films.json").write_text(Films(films=[film]).model_dump_json())
    (eval_dir(run_dir) / f"{name}.json").write_text(found.model_dump_json())
    return shot


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A directory that has evaluations, and no run."""
    run_dir = tmp_path_factory.mktemp("evaluated")
    shot = keep(run_dir, "first", "ppffpi", BENIGN)
    keep(run_dir, "second", "pppppp", BENIGN)
    (eval_dir(run_dir) / "broken.json").write_text("{")
    with serving(run_dir) as server:
        yield server, shot


def test_all_evaluations_are_listed_also_those_that_cannot_be_read(
    evaluated: tuple[Server, str],
) -> None:
    text = Bones.of(evaluated[0].page("/")).text
    for part in ("first", "second", "webarena, 1 deviations", "broken.json is not an evaluation"):
        assert part in text
    assert f"first v3 of {BENIGN} fresh instances of trained tasks, sampled" in text


def test_a_page_has_scores_films_reasons_and_deviations(evaluated: tuple[Server, str]) -> None:
    server, shot = evaluated
    page = Bones.of(server.page("/evaluations/first"))
    for part in (
        "pass@2",
        "deviates",
        "not certain",
        "Invalid episodes",
        "attempts 2",
        "gave up 2",
    ):
        assert part in page.text, part
    assert {"svg", "path", "circle", "image"} <= {name for name, _ in page.elements}
    image = f"/evaluations/first/shots/{shot}"
    assert image in page.links
    answer = server.get(image)
    assert (answer.status, answer.headers["content-type"]) == (200, "image/png")


def test_another_evaluation_is_compared_over_what_both_have(evaluated: tuple[Server, str]) -> None:
    server, _ = evaluated
    text = Bones.of(server.page("/evaluations/second?against=first")).text
    assert "second - first = +0.333" in text
    assert server.get("/evaluations/second?against=nothing").status == 400


def test_a_result_of_an_older_dart_has_its_page_and_its_row(tmp_path: Path) -> None:
    eval_dir(tmp_path).mkdir()
    older = {
        "name": "before",
        "model": "builtin:tiny",
        "weights": "",
        "policy_version": -1,
        "seed": 1000000,
        "wall_s": 4.0,
        "modes": {
            "greedy": {
                "tasks": [
                    {
                        "task_id": "a",
                        "episodes": 4,
                        "passed": 1,
                        "invalid": 0,
                        "steps": 9,
                        "rewards": 1.0,
                    }
                ],
                "compositions": [],
            }
        },
    }
    (eval_dir(tmp_path) / "before.json").write_text(json.dumps(older))
    with serving(tmp_path) as server:
        assert "0.25" in Bones.of(server.page("/evaluations/before")).text
        assert (
            "before builtin:tiny fresh instances of trained tasks, greedy"
            in Bones.of(server.page("/")).text
        )
        assert "weights builtin:tiny" in Bones.of(server.page("/evaluations/before")).text
    found = read_evaluation(tmp_path, "before")
    assert found is not None
    row = row_of(found)
    assert (row["pass@1"], row["interval method"]) == (0.25, "95 %, Wilson")
    assert "| builtin:tiny |" in as_markdown(row)


@pytest.mark.parametrize(
    "path",
    [
        *("/evaluations/nothing", "/evaluations/first/shots/films.json"),
        *("/evaluations/..%2F..%2Fetc", "/evaluations/first/shots/..%2Ffilms.json"),
        "/evaluations/second/shots/0123456789abcdef0123456789abcdef.png",
    ],
)
def test_nothing_but_evaluations_and_their_screenshots_is_served(
    evaluated: tuple[Server, str], path: str
) -> None:
    assert evaluated[0].get(path).status == 404


def test_text_of_others_changes_nothing_in_a_page_but_its_text(tmp_path: Path) -> None:
    bones = []
    for number, word in enumerate((HOSTILE, BENIGN)):
        run_dir = tmp_path / str(number)
        keep(run_dir, "one", "ppffpi", word)
        keep(run_dir, "two", "pppppp", word)
        with serving(run_dir) as server:
            pages = [server.page("/"), server.page("/evaluations/two?against=one")]
        bones.append([Bones.of(page).elements for page in pages])
    assert bones[0] == bones[1]
