"""`dart doctor` tells who plays as [teacher], or what is wrong with it, and sends nothing."""

from __future__ import annotations

from typing import Any

import pytest

from dart_cli.config.schema import Config
from dart_cli.doctor.run_checks import teacher

SERVER = {"url": "http://localhost:1/v1", "name": "eyes"}


def findings(**settings: Any) -> list[tuple[str, str, str]]:
    config = Config.model_validate({"teacher": settings})
    return [(found.subject, found.level, str(found)) for found in teacher(config)]


def test_a_teacher_is_told_as_it_would_be_asked() -> None:
    assert findings() == []
    [(subject, level, text)] = findings(**SERVER, policy={"family": "qwen3-vl"}, budget_tokens=5000)
    assert (subject, level) == ("teacher", "ok")
    assert "eyes at http://localhost:1/v1, qwen3-vl, at most 8 requests" in text
    assert "5,000 tokens" in text
    [(_, level, text)] = findings(model="builtin:tiny")
    assert (level, text) == ("ok", "teacher builtin:tiny, compact, by transformers")


@pytest.mark.parametrize(
    ("settings", "subject"),
    [
        (SERVER, "teacher.policy.family"),
        (SERVER | {"policy": {"family": "qwen2.5-vl"}}, "teacher.policy.coordinates"),
        (SERVER | {"policy": {"family": "qwen3-vl"}, "key_env": "NO_KEY"}, "teacher.key_env"),
        (SERVER | {"policy": {"family": "qwen3-vl"}, "url": "http://a:b@c/v1"}, "teacher.url"),
        ({"model": "/nowhere"}, "teacher.model"),
        ({"model": "builtin:tiny", "budget_requests": 3}, "teacher.budget_requests"),
        ({"model": "builtin:tiny", "temperature": 1e-6}, "teacher.temperature"),
    ],
)
def test_a_mistake_is_told_with_its_key(settings: dict[str, Any], subject: str) -> None:
    assert [(key, level) for key, level, _ in findings(**settings)] == [(subject, "error")]
