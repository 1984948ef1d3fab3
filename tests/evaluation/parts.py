"""Episodes that were never played."""

from __future__ import annotations

from dart_cli.evaluation.results import EpisodeRow


def episode(
    task: str, seed: int, attempt: int, outcome: str, *, heldout: bool = False
) -> EpisodeRow:
    return EpisodeRow(
        mode="sampled",
        heldout=heldout,
        task_id=task,
        seed=seed,
        attempt=attempt,
        outcome=outcome,  # type: ignore[arg-type]
        reason="",
        stop_reason="gave_up" if outcome == "fail" else "done",
        reward=None,
        steps=2,
        wall_s=0.0,
        screen=(1, 1),
        versions=[3],
    )
