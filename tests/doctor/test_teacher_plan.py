"""What a teacher takes that scores the policy's tokens, or plays: its size, its time, and its positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dart_cli.config.architecture import shape_of
from dart_cli.config.published import OTHER_SIZES
from dart_cli.config.rules import Finding
from dart_cli.config.schema import Config
from dart_cli.doctor import plan_findings as planned
from dart_cli.doctor.fit import HostCapacity, problems
from dart_cli.doctor.plan import H100, passes
from tests.config.model_parts import change_json
from tests.doctor.seven_b import CONFIG, config_of, plan_of, write_seven_b

EIGHT = HostCapacity(H100, gpus=8, is_gpu_here=True)
SHAPES = {
    one.checkpoint: shape_of({"model_type": one.model_type, **one.tree}) for one in OTHER_SIZES
}


@pytest.fixture
def seven_b(tmp_path: Path) -> Path:
    return write_seven_b(tmp_path / "7b")


def findings(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    monkeypatch.setattr(planned, "_capacity", lambda _: EIGHT)
    return list(planned.plan(config, 30))


def about(config: Config, subject: str, monkeypatch: pytest.MonkeyPatch) -> Finding:
    [finding] = [
        one for one in findings(config, monkeypatch) if one.text.startswith(f"{subject}: ")
    ]
    return finding


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_a_teacher_whose_folder_is_not_here_is_planned_by_its_published_shape(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(
        model={"path": "models/Qwen3.5-4B"},
        policy={"family": "qwen3.5"},
        teacher={"model": "models/Qwen3.5-27B"},
        train={"teacher_weight": 0.5, "ranks": 6, "recompute": recompute, "kl_beta": 0.0},
    )
    student, teacher = SHAPES["Qwen3.5-4B"], SHAPES["Qwen3.5-27B"]
    found = about(config, "teacher", monkeypatch)
    assert found.level == "ok"
    assert "the published shape of Qwen3.5-27B, 27.4 billion parameters" in found.text
    assert f"{2 * teacher.parameters / 6 / 1e9:.1f} GB of each rank" in found.text
    # Forward and backward are three passes, recomputing is one; the teacher adds its own forward pass.
    own = 3 + (recompute == "layer")
    longer = 1 + teacher.token_operations / student.token_operations / own
    assert f"take {longer:.2f} times as long; it has 262144 positions" in found.text
    without = config.model_copy(
        update={"train": config.train.model_copy(update={"teacher_weight": 0.0})}
    )
    assert not [each for each in findings(without, monkeypatch) if each.text.startswith("teacher:")]


def test_an_unknown_teacher_is_named_by_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(
        model={"path": "models/Qwen3.5-4B"},
        policy={"family": "qwen3.5"},
        teacher={"model": "models/Qwen3.5-122B"},
        train={"teacher_weight": 1.0},
    )
    [finding] = findings(config, monkeypatch)
    assert (finding.subject, finding.level) == ("plan", "warning")
    assert "there is none: teacher.model = models/Qwen3.5-122B is no folder" in finding.text


def test_prompts_longer_than_a_scoring_teacher_has_positions_are_an_error(
    seven_b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = write_seven_b(tmp_path / "short")
    change_json(short, "config.json", max_position_embeddings=16_384)
    sections: dict[str, Any] = {
        "model": {"path": str(seven_b)},
        "teacher": {"model": str(short)},
        "train": {"teacher_weight": 1.0, "kl_beta": 0.0},
    }
    config = config_of(**sections)
    plan = planned.plan_on_host(config, 30)
    assert plan is not None
    assert plan.plan.teacher_positions == 16_384 < plan.plan.longest
    [error] = [one for one in problems(plan.plan, config, EIGHT, "train") if one.level == "error"]
    assert error.subject == "teacher"
    assert f"have {plan.plan.longest} tokens (turns of 100), the teacher has 16384" in error.text
    assert not list(problems(plan.plan, config, EIGHT, "rollout"))
    assert about(config, "teacher", monkeypatch).level == "error"
    for cure in ({"policy": {"history_images": 4}}, {"teacher": {"model": str(seven_b)}}):
        assert about(config_of(**sections | cure), "teacher", monkeypatch).level == "ok"


def test_a_playing_teacher_is_warned_of_where_its_own_prompts_do_not_fit(
    seven_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its history and its answers are longer than the policy's; a server is not planned."""
    own = {"family": "ui-tars", "history_images": 5, "coordinates": "resized"}
    teacher: dict[str, Any] = {"model": str(seven_b), "engine": "vllm", "policy": own}

    def of_length(length: int, **changes: Any) -> list[Finding]:
        config = config_of(
            model={"path": str(seven_b)},
            policy={"history_images": 1},
            teacher=teacher | changes,
            vllm={"max_model_len": length},
        )
        return [
            each
            for each in findings(config, monkeypatch)
            if each.text.startswith("teacher that plays:")
        ]

    [fits] = of_length(24_576)
    assert (fits.level, "weights 16.6 GB" in fits.text) == ("ok", True)
    [warned] = of_length(12_000)
    assert warned.level == "warning"
    assert "vllm.max_model_len = 12000" in warned.text
    assert "or teacher.policy.history_images" in warned.cure
    assert of_length(12_000, url="http://localhost:1/v1", name="eyes") == []


def test_an_update_takes_as_many_passes_as_its_parts() -> None:
    assert (
        passes(shape_of(CONFIG), plan_of().setup) == 5
    )  # forward, backward, recomputed, the reference
