"""Held-out evaluation: fair episodes, kept and printed, refused where nothing can be judged."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from bus.errors import EnvError, TaskError, UserError
from dart_cli.cli.main import main
from dart_cli.config.load import load_config
from dart_cli.config.schema import Config
from dart_cli.config.task_split import trained_tasks, untrained_tasks
from dart_cli.evaluation import EvalOptions
from dart_cli.evaluation.episodes import EpisodeFolder, EpisodeRecord
from dart_cli.evaluation.evaluate import plan_eval, run_eval
from dart_cli.evaluation.films import films_dir, read_films
from dart_cli.evaluation.results import read_evaluation
from dart_cli.evaluation.score_tables import score_table, summary
from tests.env.scored_suite import SUITE as SCORED
from tests.env.unruly_suite import SUITE as UNRULY
from tests.stopping import signal_in


def test_what_is_evaluated_follows_the_configuration(config_path: Path) -> None:
    config = load_config(config_path)
    assert [task.id for task in trained_tasks(config)] == ["mini/click", "mini/popup"]
    assert [task.id for task in untrained_tasks(config)] == ["mini/popup+menu"]
    everything = load_config(config_path, ["env.tasks=[]", "eval.tasks=[]"])
    assert {task.split for task in trained_tasks(everything)} == {"train"}
    assert {task.split for task in untrained_tasks(everything)} == {"heldout"}
    only = ["mini/menu", "mini/popup+tabs"]
    assert [task.id for task in trained_tasks(config, ["mini/click", *only])] == ["mini/click"]
    assert [task.id for task in untrained_tasks(config, only)] == only
    with pytest.raises(TaskError, match="did you mean"):
        trained_tasks(config, ["mini/popupp"])


def test_an_evaluation_is_printed_kept_and_read_again(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(config_path)
    made = run_eval(config, EvalOptions(as_json=True))
    result = json.loads(capsys.readouterr().out)
    assert result == summary(made)
    assert result["sampled_tasks"]["episodes"] == result["greedy_heldout"]["episodes"] == 12
    assert set(result["sampled_tasks"]["per_task"]) == {"mini/click", "mini/popup"}
    assert read_evaluation(config.run.dir, "base") == made
    films = read_films(config.run.dir, "base")
    assert {film.task_id for film in films} == {"mini/click", "mini/popup", "mini/popup+menu"}
    folder = films_dir(config.run.dir, "base")
    for film in films:
        assert film.instruction
        for name in (film.last, *(frame.screenshot for frame in film.frames)):
            with Image.open(folder / name) as screenshot:
                assert screenshot.size == (168, 168)


def test_the_verb_prints_each_task_with_its_interval(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", str(config_path), "--mode", "greedy", "--episodes", "4"]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--tasks", "mini/click", "--keep-as", "mine"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "mini/click" in out
    assert "95 % interval" in out
    assert "fresh instances of trained tasks" in out
    assert "mini/popup" not in out
    assert "eval/mine.json" in out.replace("\n", "")


def test_a_dry_run_prints_what_the_options_choose_and_refuses_what_they_cannot(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def dry_run(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(["eval", str(config_path), "--dry-run", *arguments])
        return (exit_.value.code, *capsys.readouterr())

    code, out, _ = dry_run("--mode", "greedy", "--tasks", "mini/click", "--episodes", "4")
    assert not code
    assert "1 of mini: mini/click" in out
    assert "4 episodes greedy" in out
    assert "sampled" not in out
    assert "the model's own" in out
    for arguments, why in (
        (("--weights", "no/weights"), "no such directory"),
        (("--tasks", "nosuch"), "no task 'nosuch'"),
        (("--keep-as", "a b"), "--keep-as 'a b'"),
    ):
        code, _, error = dry_run(*arguments)
        assert code == 2
        assert why in error


def test_weights_that_are_not_there_are_named(config_path: Path) -> None:
    config = load_config(config_path)
    with pytest.raises(UserError, match="no such directory"):
        run_eval(config, EvalOptions(weights=Path("no/weights")))


@pytest.mark.parametrize("name", ["a/b", "../../x", ".x", "-x", "a b", "ä", "a\n", "n" * 300])
def test_a_name_that_is_no_file_s_is_refused_before_anything_is_played(
    config_path: Path, name: str
) -> None:
    config = load_config(config_path)
    with pytest.raises(UserError, match="--keep-as"):
        run_eval(config, EvalOptions(keep_as=name))
    assert not config.run.dir.exists()


def test_where_every_episode_is_invalid_no_result_is_kept_and_the_reasons_are(
    config_path: Path,
) -> None:
    broken = "env.tasks=['unruly/evaluate-raise', 'unruly/reset-raise']"
    some = [f"env.suite={UNRULY}", "eval.tasks=[]", "eval.episodes=13"]
    config = load_config(config_path, [*some, broken])
    reason = r"all 13 episodes were invalid.*; 7 of them: evaluate: ZeroDivisionError: a bug of"
    with pytest.raises(EnvError, match=reason):
        run_eval(config)
    assert read_evaluation(config.run.dir, "base") is None
    kept = json.loads((config.run.dir / "eval/base/invalid.json").read_text())
    assert len(kept) == 13
    assert "ZeroDivisionError" in kept[0]["reason"]


def test_stopped_while_a_reset_hangs_it_tells_what_is_kept_and_goes_on_from_there(
    config_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [f"env.suite={UNRULY}", 'env.tasks=["unruly/well", "unruly/reset-hang"]']
    changes += ["eval.tasks=[]", "env.slots=1", "eval.episodes=2"]
    signal_in(monkeypatch, "eval/0 to reset unruly/reset-hang, seed 1000001", signal.SIGTERM)
    config = load_config(config_path, changes)
    with pytest.raises(SystemExit) as stopped:
        run_eval(config, EvalOptions(mode="random"))
    assert stopped.value.code == 143
    printed, said = capsys.readouterr()
    assert printed == ""
    kept = config.run.dir / "eval" / "random"
    assert f"1 of 2 episodes are kept in {kept}" in said
    assert "the same command goes on" in said


def test_attempts_go_on_where_an_earlier_start_was_interrupted(
    config_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(config_path, ["eval.attempts=3", "eval.episodes=4"])
    sampled = EvalOptions(mode="sampled")
    kept: list[EpisodeRecord] = []
    keep = EpisodeFolder.add

    def keep_some(store: EpisodeFolder, episode: EpisodeRecord) -> None:
        if len(kept) == 5:
            raise EnvError("killed")
        kept.append(episode)
        keep(store, episode)

    with monkeypatch.context() as patched:
        patched.setattr(EpisodeFolder, "add", keep_some)
        with pytest.raises(EnvError, match="killed"):
            run_eval(config, sampled)
    assert read_evaluation(config.run.dir, "base") is None
    capsys.readouterr()
    made = run_eval(config, sampled)
    assert "has 5 of 24 episodes already; plays the others" in capsys.readouterr().err
    assert len(made.episodes) == 24  # 4 of trained tasks and 4 of others, three times
    assert {each.row.model_dump_json() for each in kept} <= {
        row.model_dump_json() for row in made.episodes
    }
    score = made.modes["sampled"]
    assert [each.k for each in score.pass_at] == [1, 2, 3]
    assert score.pass_at[0].any == score.overall.success
    by_attempt = [[row.steps for row in made.episodes if row.attempt == n] for n in range(3)]
    assert by_attempt[0] != by_attempt[1] or by_attempt[1] != by_attempt[2]
    again = run_eval(config, sampled)
    assert again.episodes == made.episodes
    assert "nothing is left to play" in capsys.readouterr().err


def test_other_settings_begin_anew_and_keep_the_older_evaluation(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["eval.episodes=2", "eval.tasks=[]"]
    options = EvalOptions(mode="random", keep_as="mine")
    first = run_eval(load_config(config_path, few), options)
    second = run_eval(load_config(config_path, [*few, "env.options.size=252x252"]), options)
    assert "begins anew (env.options was {} and is" in capsys.readouterr().err
    config = load_config(config_path)
    assert read_evaluation(config.run.dir, "mine.1") == first
    assert read_evaluation(config.run.dir, "mine") == second
    assert {row.screen for row in second.episodes} == {(252, 252)}


def test_several_processes_play_one_evaluation_as_one_would(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes, which need no model for random clicks."""
    config = load_config(config_path, ["eval.episodes=6"])
    options = EvalOptions(mode="random", keep_as="alone")
    alone = run_eval(config, options)
    arguments = [str(config_path), "--set", "eval.episodes=6"]
    together = run_eval(config, replace(options, keep_as="together", workers=2), arguments)
    assert [row.model_copy(update={"wall_s": 0.0}) for row in together.episodes] == [
        row.model_copy(update={"wall_s": 0.0}) for row in alone.episodes
    ]
    log = (config.run.dir / "logs/eval-workers.log").read_text()
    assert "error" not in log.lower()
    limited = load_config(config_path, ["up.rollout_gpus=[0]"])
    with pytest.raises(UserError, match=r"--workers 2: up\.rollout_gpus = \[0\] has GPUs for 1"):
        run_eval(limited, EvalOptions(workers=2))


def test_an_evaluation_takes_the_gpus_of_rollout_workers(
    config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    few = ["eval.episodes=1", "eval.tasks=[]", "env.tasks=['mini/click']"]
    config = load_config(config_path, [*few, "up.rollouts=2", "up.rollout_gpus=[2,3]"])
    run_eval(config, EvalOptions(mode="random"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"  # of rollout-0
    run_eval(config, EvalOptions(mode="random"))  # its own choice, from now on
    with pytest.raises(
        UserError, match=r"--workers 2: up\.rollout_gpus = \[2, 3\] names places 2, 3"
    ):
        run_eval(config, EvalOptions(workers=2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert "2 processes" in plan_eval(config, EvalOptions(workers=2))["workers"]
    unnamed = load_config(config_path, [*few, "rollout.engine='transformers'"])
    with pytest.raises(UserError, match=r"beside the trainer's there are GPUs for 3; name more"):
        plan_eval(unnamed, EvalOptions(workers=4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(UserError, match=r"= \[2\] for eval-0 names place 2 of .*list just 1"):
        plan_eval(config, EvalOptions())


def test_a_protocol_sets_what_is_published_and_the_result_tells_what_deviates(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", str(config_path), "--mode", "random", "--tasks", "mini/click"]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--protocol", "webarena", "--json"])
    assert not exit_.value.code
    said = json.loads(capsys.readouterr().out)
    assert said["protocol"] == "webarena"
    assert said["random_tasks"]["episodes"] == 1  # per_task
    assert "tasks 1, published 812" in said["deviations"]
    assert not any("attempts" in line for line in said["deviations"])
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--protocol", "webarina"])
    assert exit_.value.code == 2
    assert "did you mean" in capsys.readouterr().err


def test_one_valid_episode_is_worth_keeping(config_path: Path) -> None:
    some = ["env.tasks=['unruly/reset-raise', 'unruly/well']", "eval.tasks=[]"]
    made = run_eval(
        load_config(config_path, [f"env.suite={UNRULY}", *some]), EvalOptions(mode="greedy")
    )
    assert made.judged == 6
    assert made.modes["greedy"].overall.invalid == 6


def test_partial_rewards_are_told_beside_success(config_path: Path) -> None:
    some = ["env.tasks=['scored/0.4', 'scored/1.0']", "eval.tasks=[]"]
    config = load_config(config_path, [f"env.suite={SCORED}", *some])
    made = run_eval(config, EvalOptions(mode="random"))
    table = score_table(made, "random", made.modes["random"])
    [column] = [column for column in table.columns if column.header == "mean reward"]
    assert list(column.cells) == ["0.40", "1.00", "0.70"]
    told = summary(made)["random_tasks"]
    assert isinstance(told, dict)
    assert (told["success"], told["mean_reward"]) == (0.5, pytest.approx(0.7))
    assert told["mean_reward_per_task"] == pytest.approx({"scored/0.4": 0.4, "scored/1.0": 1.0})


def test_nothing_to_evaluate_is_an_error(config_path: Path) -> None:
    config = load_config(config_path, ["eval.episodes=0"])
    with pytest.raises(TaskError, match="nothing to evaluate"):
        asyncio.run(asyncio.to_thread(run_eval, config))


@pytest.mark.slow
def test_the_shipped_model_follows_an_instruction_and_does_nothing_more(config_path: Path) -> None:
    """It was trained on single screens; tasks of more steps are left for the run to learn."""
    config = load_config(config_path, ["rollout.engine=transformers", "eval.episodes=48"])
    made = run_eval(config, EvalOptions(mode="greedy", model="builtin:tiny"))
    success = {score.task_id: score.success for score in made.modes["greedy"].tasks}
    assert success["mini/click"] is not None
    assert success["mini/popup"] is not None
    assert success["mini/click"] >= 0.7
    assert success["mini/popup"] <= 0.7


def test_random_clicks_are_a_baseline_that_needs_no_model(config_path: Path) -> None:
    """The model's folder does not exist, and the films stay those of the model."""
    config = load_config(config_path, ["eval.episodes=20", "model.path=nowhere"])
    made = run_eval(config, EvalOptions(mode="random"))
    assert made.name == "random"
    score = made.modes["random"].overall
    assert score.episodes == 20
    assert score.success is not None
    assert score.success < 0.5
    again = run_eval(config, EvalOptions(mode="random"))
    assert again.modes == made.modes
    both = run_eval(load_config(config_path), EvalOptions(mode="all"))
    assert {mode: score.overall.episodes for mode, score in both.modes.items()} == {
        "sampled": 12,
        "greedy": 12,
        "random": 12,
    }
    assert read_films(config.run.dir, "base")


def test_random_clicks_are_not_refused_for_a_model_that_is_not_there(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ["eval", str(config_path), "--dry-run", "--set", "model.path=nowhere"]
    for mode, code in (("both", 2), ("random", 0)):
        with pytest.raises(SystemExit) as exit_:
            main([*missing, "--mode", mode])
        assert (exit_.value.code or 0) == code, capsys.readouterr().err


def test_both_figures_stand_first_and_say_where_a_fresh_seed_is_no_fresh_instance(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(config: Config) -> str:
        run_eval(config, EvalOptions(mode="random", fresh=True))
        return " ".join(capsys.readouterr().out.split())

    text = printed(load_config(config_path))
    first = text.index("fresh instances of trained tasks")
    assert text.index("random: success, 95 % interval") < first
    assert first < text.index("tasks never trained on") < text.index("mini/click")
    assert "begin alike" not in text

    some = [f"env.suite={SCORED}", "env.tasks=['scored/0.4', 'scored/1.0']", "eval.tasks=[]"]
    for heldout in ([], ["env.heldout=['scored/0.5']"]):
        config = load_config(config_path, [*some, *heldout])
        text = printed(config)
        made = read_evaluation(config.run.dir, "random")
        assert made is not None
        assert made.fixed == summary(made)["fixed_instances"]
        assert {"scored/0.4", "scored/1.0"} <= set(made.fixed)
        assert "trained tasks, the instances of training" in text
        assert "fresh instances" not in text
        assert f"{len(made.fixed)} of {len(made.fixed)} tasks begin alike for every seed" in text
        assert ("no task is kept apart" in text) == (not heldout)
    assert printed(load_config(config_path, [*some, "eval.episodes=4"])).count("begin alike") == 0
