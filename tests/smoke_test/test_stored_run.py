"""A smoke test finds mistakes that the doctor cannot find, and changes some keys of a configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bus.errors import RunDirectoryError
from dart_cli.config.schema import Config
from dart_cli.doctor.plan import HEADER
from dart_cli.smoke_test.coin_suite import CoinSuite, suite_outcome
from dart_cli.smoke_test.config_changes import plan_smoke_test
from dart_cli.smoke_test.stored_run import (
    StoredRun,
    constant_reward,
    too_long_prompts,
    unnamed_actions,
)
from dart_cli.suite_check.probes import ProbeEpisode
from envs.contract.actions import Wait
from tests.doctor.seven_b import plan_of

SEEN = StoredRun(4, 8, 0, 0, longest=900, header=300, suite_outcomes={}, prompt="", version_bytes=1)


def test_an_action_language_that_no_prompt_names() -> None:
    config = Config.model_validate(
        {
            "model": {"path": "models/x"},
            "policy": {"action_parser": "uitars", "coordinates": "thousand"},
        }
    )
    assert "start_box" in unnamed_actions(config, "click the red button")
    assert unnamed_actions(config, "Answer with click(start_box='(x,y)')") == ""


def test_a_prompt_beyond_what_the_engine_takes() -> None:
    made = plan_of()
    config = Config.model_validate(
        {"rollout": {"engine": "vllm"}, "vllm": {"max_model_len": made.longest}}
    )
    assert too_long_prompts(config, made, replace(SEEN, header=HEADER)) == ""
    result = too_long_prompts(config, made, replace(SEEN, header=HEADER + 1))
    assert f"vllm.max_model_len = {made.longest}" in result
    assert str(made.longest + 1) in result


def test_a_reward_that_never_varies() -> None:
    failed = [
        ProbeEpisode(probe="done", seed=0, outcome="fail"),
        ProbeEpisode(probe="oracle", seed=0, outcome="fail"),
    ]
    assert "all 3 verdicts are fail" in constant_reward("mini", failed, {"fail": 1})
    passed = [failed[0], ProbeEpisode(probe="oracle", seed=0, outcome="pass")]
    assert constant_reward("mini", passed, {"fail": 1}) == ""
    assert constant_reward("mine", failed[:1], {"fail": 9}) == "", "no solution is known"
    assert "all 9 verdicts are pass" in constant_reward("mine", [], {"pass": 9})


def test_a_coin_decides_beside_the_verdict_of_the_suite() -> None:
    suite = CoinSuite("mini")
    env = suite.make_env()
    task = next(iter(suite.tasks))
    outcomes = set()
    for seed in range(20):
        env.reset(seed=seed, options={"task": task})
        assert env.evaluate().outcome == "fail", "at reset the suite's own"
        env.step(Wait())
        verdict = env.evaluate()
        assert suite_outcome(verdict.reason) == "fail"
        outcomes.add(verdict.outcome)
    env.close()
    assert outcomes == {"pass", "fail"}


def test_only_the_folder_of_a_smoke_test_is_removed(tmp_path: Path) -> None:
    toml = tmp_path / "dart.toml"
    toml.write_text(f'[run]\ndir = "{tmp_path / "run"}"\n[weights]\nchannel = "gloo"\n')
    plan = plan_smoke_test(toml, ["data.group_size=8"])
    assert plan.config.run.dir.is_relative_to(plan.folder)
    assert plan.config.data.group_size == 2
    assert plan.config.weights.channel == "gloo"
    assert not (tmp_path / "run").exists()
    plan_smoke_test(toml, [])  # again
    (plan.folder / "smoke-test.json").unlink()
    with pytest.raises(RunDirectoryError, match="is not the folder of a smoke test"):
        plan_smoke_test(toml, [])
