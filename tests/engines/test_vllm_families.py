"""vLLM's classes of the older families see what the trainer sees; the newest one's tests are test_vllm_engine.py."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.doctor.parts import doctor

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: scripts/setup-vllm"
    ),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.slow,
]


@pytest.mark.parametrize(
    ("model_type", "workers"), [("qwen2_vl", 1), ("qwen2_5_vl", 2), ("qwen3_5", 1)]
)  # the second one's head is not tied to its embeddings: two workers have a part of each
def test_engine_and_trainer_agree(
    model_type: str,
    workers: int,
    pointer_folder: Callable[[str], Path],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With a pointer head in the folder, and in every weight set, which vLLM does not load."""
    folder = pointer_folder(model_type)
    sets = ["rollout.engine=vllm", "rollout.max_tokens=8", f"vllm.tensor_parallel={workers}"]
    sets += ["policy.history_images=3", "policy.history_turns=3", "env.options={size = [336, 224]}"]
    if workers == 1:  # and whole with two
        sets += ["vllm.options={enable_chunked_prefill = true, max_num_batched_tokens = 64}"]
    assert doctor(folder, "--parity", *(part for each in sets for part in ("--set", each))) == 0
    told = capfd.readouterr().out
    assert "several screens" in told
    assert "336x224, up to 3 in a prompt" in told
    assert "within 0.001 nats" in told
