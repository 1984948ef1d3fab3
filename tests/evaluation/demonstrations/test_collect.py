"""Collected successes are what a rollout would have handed in, and enough of them, once."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bus.errors import ExchangeError, RunDirectoryError, TaskError, UserError
from bus.messages import ActRequest, Completion, TrajectoryEnd, Turn
from dart_cli.cli.main import main
from dart_cli.config.schema import Config, load_config
from dart_cli.data.exchange.parquet_schema import Shards, Trajectory, read_folder
from dart_cli.data.exchange.transfer import import_folder
from dart_cli.data.store.writer import open_reader, open_store
from dart_cli.env.episode import conventions_of
from dart_cli.evaluation.demonstrations import (
    CollectOptions,
    HintedSeat,
    PolicySeat,
    Quota,
    collected_tasks,
    play_quotas,
    run_collect,
    task_seed,
)
from dart_cli.policy.codec import make_codec
from dart_cli.policy.forward import image_features, logits, masked_logprobs
from dart_cli.policy.frames import make_coordinate_map
from dart_cli.policy.model import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer
from dart_cli.rollout.worker import load_model, load_prompt_encoder
from envs.actions import action_from_dict
from envs.registry import find_task, make_env

SUITES = Path(__file__).parents[1] / "suites"
KINDS = ["mini/popup", "mini/page", "mini/scroll"]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Three kinds of task, with screens and texts of the past in the prompt."""
    return Config.model_validate(
        {
            "run": {"dir": tmp_path / "run", "seed": 5},
            "env": {"tasks": KINDS, "slots": 4},
            "policy": {"history_images": 2, "history_turns": 2},
            "rollout": {"max_tokens": 12, "max_batch": 8, "device": "cpu"},
        }
    )


@pytest.fixture(scope="module")
def policy() -> LoadedPolicy:
    return load_policy("builtin:tiny")


# --- the oracle -----------------------------------------------------------------------------


def test_the_oracles_steps_are_what_a_rollout_would_have_handed_in(
    config: Config, policy: LoadedPolicy
) -> None:
    """Played again by hand: the same screens, actions, prompts and texts; tokens that decode."""
    run_collect(config, CollectOptions(per_task=2))
    renderer, codec = PromptRenderer(policy), make_codec("compact")
    env = make_env("mini")
    with open_reader(config.run.dir) as reader:
        members = reader.pool()
        assert sorted(row.task_id for row in members) == sorted(2 * KINDS)
        for row in members:
            assert (row.source, row.known, row.task_seed < 1_000_000) == ("oracle", False, True)
            steps = reader.steps(row.trajectory_id)
            task = find_task("mini", row.task_id)
            screen, info = env.reset(seed=row.task_seed, options={"task": task})
            past: list[Turn] = []
            for step in steps:
                assert reader.screenshots([step.screenshot])[step.screenshot] == screen.screenshot
                frame = make_coordinate_map("thousandths", screen.width, screen.height)
                assert step.text == codec.format(env.oracle_action(), frame)  # type: ignore[attr-defined]
                visible = [past[-2].model_copy(update={"screenshot": None})] if past[1:] else []
                rendered = renderer.render(
                    str(info["instruction"]), [*visible, *past[-1:]], screen.screenshot
                )
                assert step.prompt_token_ids == rendered.token_ids
                assert policy.decode(step.token_ids) == step.text
                assert step.token_ids[-1] in policy.end_token_ids
                assert not set(step.token_ids) & set(policy.forbidden_token_ids)
                assert step.behaviour_logprobs == step.entropies == step.version_spans == []
                assert step.action is not None
                past.append(Turn(text=step.text, screenshot=screen.screenshot))
                screen, reward, *_ = env.step(action_from_dict(step.action))
            assert reward == 1.0


def test_what_was_collected_before_is_neither_played_nor_kept_twice(config: Config) -> None:
    first = run_collect(config, CollectOptions(per_task=2))
    again = run_collect(config, CollectOptions(per_task=2))
    more = run_collect(config, CollectOptions(per_task=3))
    assert [quota.played for quota in first] == [2, 2, 2]
    assert [(quota.played, quota.there) for quota in again] == 3 * [(0, 2)]
    assert [(quota.played, quota.there) for quota in more] == 3 * [(1, 2)]
    with open_reader(config.run.dir) as reader:
        assert len(reader.pool()) == 9


def test_a_folder_of_successes_is_the_same_ones_and_joins_a_pool(
    config: Config, tmp_path: Path
) -> None:
    run_collect(config, CollectOptions(per_task=2), out=tmp_path / "out")
    assert not config.run.dir.exists()
    ids = {each.id for each in read_folder(tmp_path / "out")}
    run_collect(config, CollectOptions(per_task=2))
    with open_reader(config.run.dir) as reader:
        assert {row.trajectory_id for row in reader.pool()} == ids
    assert import_folder(config, tmp_path / "out").there == 6


def test_a_prompt_encoder_without_weights_writes_what_the_whole_policy_writes(
    config: Config, policy: LoadedPolicy
) -> None:
    light = load_policy("builtin:tiny", weights=False)
    for name in ("image_token_id", "pad_token_id", "end_token_ids", "forbidden_token_ids"):
        assert getattr(light, name) == getattr(policy, name)
    assert light.max_positions == policy.max_positions
    assert load_prompt_encoder(config).write("click(1,999)") == policy.write("click(1,999)")


# --- a policy -------------------------------------------------------------------------------


class Listening:
    """Answers, and remembers what was asked and said."""

    def __init__(self, answers: PolicySeat) -> None:
        self._answers = answers
        self.heard: list[tuple[ActRequest, Completion]] = []

    async def answer(self, request: ActRequest) -> Completion:
        completion = await self._answers.act(request)
        self.heard.append((request, completion))
        return completion


async def test_a_hint_is_sampled_under_and_stored_without(
    config: Config, policy: LoadedPolicy
) -> None:
    """Stored: the plain prompt, and the log-probabilities of the tokens under the hinted one."""
    config = config.model_copy(update={"policy": Config().policy})
    model = load_model(config)
    listening = Listening(PolicySeat(model.responder))
    action_spec = conventions_of(config)
    wanted = CollectOptions(per_task=1, tasks=("mini/popup",), player="policy", hints=True)
    quotas = [Quota(task, wanted, 5) for task in collected_tasks(config, wanted)]
    kept: list[Trajectory] = []
    await play_quotas(
        config,
        quotas,
        lambda env: HintedSeat(listening, env, model.responder.prompt_encoder, action_spec),  # type: ignore[arg-type]
        wanted.source,
        kept.append,
    )
    await model.engine.close()
    [found] = kept
    assert found.source == "demonstration"
    assert found.known
    renderer = PromptRenderer(policy)
    heard = listening.heard[-len(found.steps) :]
    _, info = make_env("mini").reset(seed=found.task_seed, options={"task": found.task_id})
    task_says = info["instruction"]
    assert heard[0][0].instruction != task_says  # the pop-up first; what the task says after that
    for step, (asked, said) in zip(found.steps, heard, strict=True):
        hinted = renderer.render(asked.instruction, asked.turns, asked.screenshot)
        assert said.prompt_token_ids == hinted.token_ids
        assert (hinted.token_ids == step.prompt_token_ids) == (asked.instruction == task_says)
        assert step.token_ids == said.token_ids
        assert step.behaviour_logprobs == said.behaviour_logprobs
        images = [found.images[name] for name in step.image_hashes]
        under_hint = _logprobs(policy, hinted.token_ids, step.token_ids, images)
        assert step.behaviour_logprobs == pytest.approx(under_hint, abs=1e-4)
    first = found.steps[0]
    shown = [found.images[name] for name in first.image_hashes]
    plain = _logprobs(policy, first.prompt_token_ids, first.token_ids, shown)
    assert list(first.behaviour_logprobs) != pytest.approx(plain, abs=1e-2)


def _logprobs(
    policy: LoadedPolicy, prompt: list[int], completion: list[int], images: list[bytes]
) -> list[float]:
    """Of each token of a completion, by one whole forward pass, nats."""
    inputs = policy.inputs([[*prompt, *completion]], [images])
    with torch.no_grad():
        features = image_features(policy.model, inputs.images)
        values = logits(policy.model, inputs, last=len(completion) + 1, features=features)
    logprobs = masked_logprobs(values[0, :-1], policy.forbidden(torch.device("cpu")), 1.0)
    return [float(row[token]) for row, token in zip(logprobs, completion, strict=True)]


@given(
    outcomes=st.lists(st.booleans(), min_size=1, max_size=60),
    wanted=st.integers(1, 4),
    shuffle=st.randoms(use_true_random=False),
    slots=st.integers(1, 6),
)
def test_what_is_kept_depends_on_outcomes_and_not_on_who_ends_first(
    outcomes: list[bool], wanted: int, shuffle: Random, slots: int
) -> None:
    """The first successes of the seeds in their order, whatever the interleaving."""
    passes = {task_seed(0, "t", i): outcomes[i % len(outcomes)] for i in range(16 * wanted)}
    quota = Quota(find_task("mini", "mini/click"), CollectOptions(wanted, player="policy"), 0)
    quota.task = quota.task.__class__("t", "mini", "", 3)
    playing: list[int] = []
    kept: list[int] = []
    while True:
        while quota.wants_more and len(playing) < slots:
            playing.append(quota.next_seed())
        if not playing:
            break
        seed = playing.pop(shuffle.randrange(len(playing)))
        quota.ended(_end("pass" if passes[seed] else "fail"))
        if passes[seed]:
            kept.append(seed)
    in_order = [seed for seed in passes if passes[seed]][:wanted]
    assert sorted(kept) == sorted(in_order)
    assert quota.missing == wanted - len(kept)


def test_a_seed_that_comes_again_is_not_played_again() -> None:
    """Else the same success would stand in the folder twice, which no import takes."""
    quota = Quota(find_task("mini", "mini/click"), CollectOptions(16), 4970)
    seeds = [task_seed(4970, "mini/click", number) for number in range(17)]
    assert len(set(seeds)) == 16
    assert [quota.next_seed() for _ in range(16)] == list(dict.fromkeys(seeds))


def _end(outcome: str) -> TrajectoryEnd:
    return TrajectoryEnd.model_validate(
        {
            "trajectory_id": "t",
            "steps": 1,
            "outcome": outcome,
            "reason": "",
            "stop_reason": "done",
            "screenshot": None,
            "reset_s": 0.0,
            "wall_s": 0.0,
        }
    )


# --- mistakes -------------------------------------------------------------------------------


def test_held_out_tasks_and_live_runs_are_refused(config: Config) -> None:
    with pytest.raises(TaskError, match="held out"):
        run_collect(config, CollectOptions(tasks=("mini/popup+menu",)))
    with pytest.raises(TaskError, match="did you mean"):
        run_collect(config, CollectOptions(tasks=("mini/popupp",)))
    with open_store(config.run.dir), pytest.raises(RunDirectoryError, match="--out"):
        run_collect(config, CollectOptions())


def test_an_environment_without_an_oracle_says_so(config: Config, tmp_path: Path) -> None:
    suite = f"{SUITES / 'coin_suite.py'}:CoinSuite"
    changed = config.model_copy(
        update={"env": config.env.model_copy(update={"suite": suite, "tasks": []})}
    )
    with pytest.raises(UserError, match=r"no success was collected: .*no oracle"):
        run_collect(changed, CollectOptions(per_task=1), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_solution_that_is_too_long_to_say_is_told(config: Config) -> None:
    changed = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"max_tokens": 3})}
    )
    with pytest.raises(UserError, match=r"takes \d tokens, rollout.max_tokens = 3"):
        run_collect(changed, CollectOptions(per_task=1))


def test_a_success_that_cannot_be_kept_is_told_in_one_line(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_shards: Shards, _trajectory: Trajectory) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Shards, "add", full)
    with pytest.raises(ExchangeError, match="cannot be written: No space left"):
        run_collect(config, CollectOptions(1), out=tmp_path / "out")


def test_the_verb_collects_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[rollout]\nmax_tokens = 12\n[env]\ntasks = ["mini/click"]\n'
    )
    with pytest.raises(SystemExit) as exit_:
        main(["data", "collect", str(path), "--per-task", "2", "--json"])
    assert exit_.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["collected"], told["missing"]) == (2, 0)
    assert load_config(path).run.dir == Path(told["into"])
    with pytest.raises(SystemExit) as exit_:
        main(["data", "collect", str(path), "--hints"])
    assert exit_.value.code == 2
    assert "add --from policy" in capsys.readouterr().err


def test_every_hint_of_suite_mini_is_an_instruction_that_its_base_model_knows() -> None:
    from envs.embedded.grounding import INSTRUCTIONS

    env = make_env("mini")
    for task in ("popup", "menu", "page", "confirm", "tabs", "folder", "scroll", "form", "delete"):
        _, info = env.reset(seed=3, options={"task": f"mini/{task}"})
        for _ in range(info["need"]):
            assert env.oracle_hint() in INSTRUCTIONS  # type: ignore[attr-defined]
            env.step(env.oracle_action())  # type: ignore[attr-defined]
