"""The real vLLM plays as a teacher: what is stored is what the engine of transformers shows."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from dart_cli.collect import CollectOptions
from dart_cli.collect.collector import run_collect
from dart_cli.config.load import default_config
from dart_cli.config.rules.check import check_config
from dart_cli.data.store.open import open_reader

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: scripts/setup-vllm"
    ),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


def shown_by(engine: str, folder: Path) -> set[str]:
    """Return the ids of the pool's members, which hash prompts, screens, tokens and actions."""
    keys = {
        "run.dir": folder / engine,
        "env.tasks": ["mini/click", "mini/popup"],
        "env.slots": 2,
        "rollout.max_tokens": 12,
        "rollout.max_batch": 2,
        "rollout.device": "cpu",
        "teacher.model": "builtin:tiny",
        "teacher.engine": engine,
        "teacher.max_tokens": 40,
        "vllm.options": "{kv_cache_memory_bytes = 200000000}",
    }
    config = default_config([f"{key}={value}" for key, value in keys.items()])
    check_config(config, None, "env")
    check_config(config, None, "teacher")
    run_collect(config, CollectOptions(per_task=2, player="teacher", hints=True))
    with open_reader(config.run.dir) as reader:
        rows = reader.pool()
        assert {row.source for row in rows} == {"teacher"}
        return {row.trajectory_id for row in rows}


def test_its_successes_are_those_of_the_other_engine(tmp_path: Path) -> None:
    by_vllm = shown_by("vllm", tmp_path)
    assert len(by_vllm) == 4
    assert by_vllm == shown_by("transformers", tmp_path)
