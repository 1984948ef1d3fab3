"""Collected successes are what a rollout would have submitted, and enough of them, once."""

from __future__ import annotations

import errno
import json
import signal
from pathlib import Path

import pytest

from bus.errors import ConfigError, ExchangeError, RunDirectoryError, TaskError, UserError
from bus.messages import Turn
from dart_cli.cli.main import main
from dart_cli.collect import CollectOptions
from dart_cli.collect.collector import run_collect
from dart_cli.config.load import load_config
from dart_cli.config.schema import Config
from dart_cli.data.exchange.parquet_read import read_folder
from dart_cli.data.exchange.parquet_schema import Trajectory
from dart_cli.data.exchange.parquet_write import Shards
from dart_cli.data.exchange.transfer import import_folder
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.parsers import make_action_parser
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.prompt import make_renderer
from envs.contract.actions import action_from_dict
from envs.contract.registry import find_task, make_env
from tests.env.unruly_suite import SUITE as UNRULY
from tests.stopping import signal_in

SUITES = Path(__file__).parents[1] / "own_suites"


def test_the_oracles_steps_are_what_a_rollout_would_have_handed_in(
    config: Config, policy: LoadedPolicy
) -> None:
    """Played again by hand: the same screens, actions, prompts and texts; tokens that decode."""
    run_collect(config, CollectOptions(per_task=2))
    renderer, action_parser = make_renderer(policy, config.policy), make_action_parser("compact")
    env = make_env("mini")
    with open_reader(config.run.dir) as reader:
        members = reader.pool()
        assert sorted(row.task_id for row in members) == sorted(2 * list(config.env.tasks))
        for row in members:
            assert (row.source, row.has_logprobs, row.task_seed < 1_000_000) == (
                "oracle",
                False,
                True,
            )
            steps = reader.steps(row.trajectory_id)
            task = find_task("mini", row.task_id)
            screen, info = env.reset(seed=row.task_seed, options={"task": task})
            past: list[Turn] = []
            for step in steps:
                assert reader.screenshots([step.screenshot])[step.screenshot] == screen.screenshot
                coordinates = make_coordinate_map("thousandths", screen.width, screen.height)
                assert step.text == action_parser.format(env.oracle_action(), coordinates)  # type: ignore[attr-defined]
                visible = [past[-2].model_copy(update={"screenshot": None})] if past[1:] else []
                rendered = renderer.render(
                    str(info["instruction"]), [*visible, *past[-1:]], screen.screenshot
                )
                assert step.prompt_token_ids == rendered.token_ids
                assert policy.decode(step.sampled.token_ids) == step.text
                assert step.sampled.token_ids[-1] in policy.end_token_ids
                assert not set(step.sampled.token_ids) & set(policy.forbidden_token_ids)
                assert (
                    step.sampled.behaviour_logprobs
                    == step.sampled.entropies
                    == step.sampled.version_spans
                    == []
                )
                assert step.action is not None
                past.append(Turn(text=step.text, screenshot=screen.screenshot))
                screen, reward, *_ = env.step(action_from_dict(step.action))
            assert reward == 1.0


def test_what_was_collected_before_is_neither_played_nor_kept_twice(config: Config) -> None:
    first = run_collect(config, CollectOptions(per_task=2))
    again = run_collect(config, CollectOptions(per_task=2))
    more = run_collect(config, CollectOptions(per_task=3))
    assert [quota.episodes for quota in first] == [2, 2, 2]
    assert [(quota.episodes, quota.existing) for quota in again] == 3 * [(0, 2)]
    assert [(quota.episodes, quota.existing) for quota in more] == 3 * [(1, 2)]
    with open_reader(config.run.dir) as reader:
        assert len(reader.pool()) == 9


def test_a_folder_of_successes_is_the_same_ones_and_joins_a_pool(
    config: Config, tmp_path: Path
) -> None:
    run_collect(config, CollectOptions(per_task=2, out=tmp_path / "out"))
    assert not config.run.dir.exists()
    ids = {each.id for each in read_folder(tmp_path / "out")}
    run_collect(config, CollectOptions(per_task=2))
    with open_reader(config.run.dir) as reader:
        assert {row.trajectory_id for row in reader.pool()} == ids
    assert import_folder(config, tmp_path / "out").already_there == 6


def test_held_out_tasks_and_live_runs_are_refused(config: Config) -> None:
    with pytest.raises(TaskError, match="held out"):
        run_collect(config, CollectOptions(tasks=("mini/popup+menu",)))
    with pytest.raises(TaskError, match="did you mean"):
        run_collect(config, CollectOptions(tasks=("mini/popupp",)))
    with open_store(config.run.dir), pytest.raises(RunDirectoryError, match="--out"):
        run_collect(config, CollectOptions())


def test_a_model_that_collects_takes_the_gpu_of_a_rollout_worker(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    up = config.up.model_copy(update={"rollout_gpus": [2]})
    with pytest.raises(ConfigError, match=r"up\.rollout_gpus = \[2\] for collect-0 names place 2"):
        run_collect(config.model_copy(update={"up": up}), CollectOptions(player="policy"))


def test_an_environment_without_an_oracle_is_an_error_that_names_it(
    config: Config, tmp_path: Path
) -> None:
    suite = f"{SUITES / 'coin_suite.py'}:CoinSuite"
    changed = config.model_copy(
        update={"env": config.env.model_copy(update={"suite": suite, "tasks": []})}
    )
    with pytest.raises(UserError, match=r"no success was collected: .*no oracle"):
        run_collect(changed, CollectOptions(per_task=1, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_solution_of_too_many_tokens_is_an_error(config: Config) -> None:
    changed = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"max_tokens": 3})}
    )
    with pytest.raises(UserError, match=r"takes \d tokens, rollout.max_tokens = 3"):
        run_collect(changed, CollectOptions(per_task=1))


def test_a_success_that_cannot_be_kept_is_an_error_of_one_line(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_shards: Shards, _trajectory: Trajectory) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Shards, "add", full)
    with pytest.raises(ExchangeError, match="cannot be written: No space left"):
        run_collect(config, CollectOptions(1, out=tmp_path / "out"))


@pytest.mark.parametrize("is_folder", [False, True])
def test_stopped_by_a_signal_it_keeps_and_prints_what_was_collected(
    is_folder: bool,
    config: Config,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = ["unruly/well", "unruly/reset-hang"]
    env = config.env.model_copy(update={"suite": UNRULY, "tasks": tasks, "slots": 1})
    unruly = config.model_copy(update={"env": env})
    out = tmp_path / "out" if is_folder else None
    signal_in(monkeypatch, "collect/0 to reset unruly/reset-hang", signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        run_collect(unruly, CollectOptions(per_task=2, out=out, as_json=True))
    assert stopped.value.code == 143
    printed, said = capsys.readouterr()
    found = json.loads(printed)
    assert (found["collected"], found["missing"], found["stopped"]) == (2, 2, True)
    assert "stopped by SIGTERM; it had waited 0 s for collect/0 to reset" in said
    if out is None:
        with open_reader(config.run.dir) as reader:
            assert len(reader.pool()) == 2
    else:
        assert len(list(read_folder(out))) == 2


def test_stopped_before_its_first_success_it_makes_no_folder(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = config.env.model_copy(update={"suite": UNRULY, "tasks": ["unruly/reset-hang"]})
    signal_in(monkeypatch, "to reset unruly/reset-hang", signal.SIGHUP)
    options = CollectOptions(per_task=1, out=tmp_path / "out")
    with pytest.raises(SystemExit) as stopped:
        run_collect(config.model_copy(update={"env": env}), options)
    assert stopped.value.code == 129
    assert list(tmp_path.iterdir()) == []


def test_the_verb_collects_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[rollout]\nmax_tokens = 12\n[env]\ntasks = ["mini/click"]\n'
    )
    with pytest.raises(SystemExit) as exit_:
        main(["data", "collect", str(path), "--per-task", "2", "--json"])
    assert exit_.value.code == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["collected"], result["missing"]) == (2, 0)
    assert load_config(path).run.dir == Path(result["into"])
    with pytest.raises(SystemExit) as exit_:
        main(["data", "collect", str(path), "--hints"])
    assert exit_.value.code == 2
    assert "add --from policy" in capsys.readouterr().err
