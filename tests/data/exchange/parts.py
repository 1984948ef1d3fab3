"""What the exchange tests share: small trajectories and their folders."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from bus.messages import SampledTokens
from dart_cli.data.exchange.parquet_schema import Trajectory
from dart_cli.data.exchange.parquet_write import write_folder
from dart_cli.data.store.steps import StepRow
from envs.contract.blobs import content_hash

TASK = "mini/click"


def png(*seed: int, encoding: str = "PNG") -> bytes:
    """A small picture, other ones for other seeds."""
    file = io.BytesIO()
    Image.new("RGB", (28, 28), tuple(hash((*seed, i)) % 256 for i in range(3))).save(file, encoding)
    return file.getvalue()


def step(number: int, image: bytes, earlier: list[str], **changes: Any) -> StepRow:
    row = StepRow(
        trajectory_id="t0",
        step=number,
        at=0.0,
        screenshot=content_hash(image),
        image_hashes=[*earlier, content_hash(image)],
        prompt_token_ids=[4, 5, 6 + number],
        sampled=SampledTokens(
            token_ids=[9, 8],
            behaviour_logprobs=[-0.5, -1 / 3],
            entropies=[0.25, 1.5],
            version_spans=[],
        ),
        text="click(1,2)",
        action={"kind": "click", "x": 1, "y": 2, "button": "left"},
        error="",
        model_s=0.5,
        env_s=0.25,
        worker="",
    )
    return replace(row, **changes)


def trajectory(
    name: str = "t0", steps: int = 2, encoding: str = "PNG", **changes: Any
) -> Trajectory:
    """A success; each prompt shows the screen before it, too."""
    shots = [png(number, len(name), encoding=encoding) for number in range(steps)]
    keys = [content_hash(shot) for shot in shots]
    rows = [
        step(i, shot, keys[max(0, i - 1) : i], trajectory_id=name) for i, shot in enumerate(shots)
    ]
    whole = Trajectory(
        id=name,
        suite="mini",
        task_id=TASK,
        task_seed=7,
        instruction="click the red button",
        source="online",
        origin=f"elsewhere/{name}",
        outcome="pass",
        verdict_reason="the goal is reached",
        stop_reason="done",
        app_log="step 0: TypeError: x is undefined\nstep 1: GET /a: 404",
        steps=rows,
        images=dict(zip(keys, shots, strict=True)),
        final_screenshot=png(99),
    )
    return replace(whole, **changes)


def written(folder: Path, *trajectories: Trajectory, **options: Any) -> Path:
    with write_folder(folder, {"run": "r"}, **options) as shards:
        for each in trajectories:
            shards.add(each)
    return folder
