"""Two evaluations beside each other: only what both have judged counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bus.errors import UserError
from dart_cli.algo.statistics import mcnemar, sign_flip
from dart_cli.cli.main import main
from dart_cli.evaluation.compare import (
    MCNEMAR,
    SIGN_FLIP,
    compare,
    comparison_table,
    difference_text,
)
from dart_cli.evaluation.leaderboard import as_markdown, row_of
from dart_cli.evaluation.results import EpisodeRow, EvalSettings, Evaluation, ProtocolCheck
from dart_cli.evaluation.scores import mode_score
from tests.evaluation.parts import episode


def evaluation(name: str, rows: list[EpisodeRow], attempts: int = 1) -> Evaluation:
    tasks = list(dict.fromkeys(row.task_id for row in rows))
    return Evaluation(
        name=name,
        model="m",
        weights="",
        policy_version=3,
        seed=0,
        wall_s=1.0,
        modes={"sampled": mode_score(rows, tasks, [], attempts)},
        attempts=attempts,
        settings=EvalSettings(
            suite="s",
            suite_digest="d",
            model_digest="e",
            weights_digest=name,
            values={
                "policy.action_parser": "compact",
                "policy.history_images": 1,
                "rollout.temperature": 1.0,
            },
        ),
        protocol=ProtocolCheck(
            name="webarena",
            title="WebArena",
            sources=[],
            deviations=["tasks 2, published 812"],
            left_to_model=[],
            uncertain=[],
        ),
        dart="0.1.0",
        finished_at=0.0,
        episodes=rows,
    )


def outcomes(task: str, text: str, attempt: int = 0) -> list[EpisodeRow]:
    """An episode for each letter: p, f or i, with seeds from 0."""
    names = {"p": "pass", "f": "fail", "i": "invalid"}
    return [episode(task, seed, attempt, names[each]) for seed, each in enumerate(text)]


def test_pairs_of_single_attempts_are_tested_exactly() -> None:
    first = evaluation("a", [*outcomes("x", "ffffpi"), *outcomes("y", "pf")])
    second = evaluation("b", [*outcomes("x", "ppppfp"), *outcomes("y", "ppp")])
    [result] = compare(first, second).modes
    assert (result.instances, result.first_only, result.second_only) == (7, 1, 5)
    assert result.p == mcnemar(1, 5)
    assert result.test == MCNEMAR
    assert [(row.task_id, row.instances, row.first, row.second) for row in result.tasks] == [
        *(("x", 5, 0.2, 0.8), ("y", 2, 0.5, 1.0))
    ]
    assert (result.first, result.second) == (pytest.approx(0.35), pytest.approx(0.9))
    assert result.difference == pytest.approx(0.55)
    assert result.interval is None
    back = compare(second, first).modes[0]
    assert (back.p, back.difference) == (result.p, -result.difference)


def test_the_line_says_what_the_test_and_the_interval_are_about() -> None:
    few = compare(
        evaluation(
            "a", [*outcomes("x", "f" * 20), *outcomes("y", "f" * 20), *outcomes("z", "p" * 20)]
        ),
        evaluation(
            "b", [*outcomes("x", "p" * 20), *outcomes("y", "f" * 20), *outcomes("z", "p" * 20)]
        ),
    )
    assert difference_text(few, few.modes[0]) == (
        "b - a = +0.333; for these 3 tasks p = 1.91e-06 by McNemar's exact test over 60 instances; only a passed "
        "0 of the instances, only b 20; for other tasks of this kind no interval: it needs 10 tasks"
    )
    names = [f"t{number}" for number in range(10)]
    many = compare(
        evaluation("a", [row for name in names for row in outcomes(name, "f")]),
        evaluation("b", [row for name in names for row in outcomes(name, "p")]),
    )
    assert difference_text(many, many.modes[0]).endswith(
        "; for other tasks of this kind +1.000 to +1.000 (95 %)"
    )
    one = compare(
        evaluation("a", outcomes("x", "f" * 10)), evaluation("b", outcomes("x", "p" * 10))
    )
    text = difference_text(one, one.modes[0])
    assert "for this task p = 0.00195 by" in text
    assert text.endswith("for other instances of this task +1.000 to +1.000 (95 %)")


def test_several_attempts_are_tested_by_random_signs_of_instances() -> None:
    first = evaluation("a", [*outcomes("x", "fpf"), *outcomes("x", "ffp", 1)], 2)
    second = evaluation("b", [*outcomes("x", "ppp"), *outcomes("x", "pfi", 1)], 2)
    [result] = compare(first, second).modes
    assert result.test == SIGN_FLIP
    assert result.p == sign_flip([1.0, 0.0, 0.5], seed=0)
    assert result.first_only is None


def test_what_shares_nothing_is_refused_with_what_each_has() -> None:
    first = evaluation("a", outcomes("x", "p"))
    with pytest.raises(UserError, match="b has sampled, 1 tasks, seeds 0 to 1"):
        compare(first, evaluation("b", outcomes("y", "pp")))
    older = first.model_copy(update={"episodes": [], "name": "old"})
    with pytest.raises(UserError, match="old has no single episodes"):
        compare(first, older)


def test_differing_settings_are_told() -> None:
    result = compare(evaluation("a", outcomes("x", "pf")), evaluation("b", outcomes("x", "pf")))
    assert result.settings == ["weights: a, b"]
    assert result.modes[0].p == 1.0
    assert comparison_table(result, result.modes[0]).row_count == 2


def test_a_row_has_what_makes_a_score_repeatable() -> None:
    rows = [*outcomes("x", "pfi"), *outcomes("x", "ppp", 1)]
    row = row_of(evaluation("a", rows, 2))
    assert row["pass@1"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert row["pass@k"] == {"1": row["pass@1"], "2": 1.0}
    assert (row["episodes"], row["invalid"], row["instances"], row["attempts"]) == (5, 1, 3, 2)
    assert row["versions that answered"] == [3]
    assert row["history"] == {"history_images": 1}
    text = as_markdown(row)
    assert text.startswith("| benchmark | model | steps | pass@1 |")
    assert "5 and 1 invalid" in text
    assert "- deviations: tasks 2, published 812" in text
    with pytest.raises(UserError, match="no episodes of mode greedy"):
        row_of(evaluation("a", rows), "greedy")


def test_the_verbs_read_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("a", "ppf"), ("b", "fpp")):
        result = evaluation(name, outcomes("x", text))
        (tmp_path / f"{name}.json").write_text(result.model_dump_json())

    def say(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(["eval", *arguments])
        return (exit_.value.code or 0, *capsys.readouterr())

    code, out, _ = say("compare", str(tmp_path / "a"), str(tmp_path / "b.json"), "--json")
    assert code == 0
    assert json.loads(out)["modes"][0]["p"] == 1.0
    code, out, _ = say("row", str(tmp_path / "a"), "--json")
    assert json.loads(out)["pass@1"] == pytest.approx(2 / 3)
    code, _, error = say("row", str(tmp_path / "nothing"))
    assert code == 2
    assert "no such result" in error


def test_digests_are_short_for_people_and_whole_for_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = "0123456789abcdef" * 8
    for name, weights in (("a", ""), ("b", digest)):
        result = evaluation(name, outcomes("x", "ppf"))
        assert result.settings is not None
        settings = result.settings.model_copy(update={"weights_digest": weights})
        result = result.model_copy(update={"settings": settings})
        (tmp_path / f"{name}.json").write_text(result.model_dump_json())
    for options, digest_text in (([], digest[:12]), (["--json"], digest)):
        with pytest.raises(SystemExit):
            main(["eval", "compare", str(tmp_path / "a"), str(tmp_path / "b"), *options])
        out = capsys.readouterr().out
        assert f"weights: base weights, {digest_text}" in out
        assert (digest in out) == bool(options)


def test_a_task_that_only_one_of_two_runs_trains_on_is_compared_and_named() -> None:
    first = evaluation("a", [*outcomes("x", "ff"), *outcomes("y", "pf")])
    others = [row.model_copy(update={"heldout": True}) for row in outcomes("y", "pp")]
    result = compare(first, evaluation("b", [*outcomes("x", "pp"), *others]))
    parts = [(mode.part, [task.task_id for task in mode.tasks]) for mode in result.modes]
    assert parts == [("fresh instances of trained tasks", ["x"]), ("tasks never trained on", ["y"])]
    assert "trained on in one of them only: y" in result.settings
