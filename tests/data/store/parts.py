"""What the store tests share: a small group in a store."""

from __future__ import annotations

from dart_cli.data.store.rows import GroupRow
from dart_cli.data.store.writer import Store
from tests.data.parts import (
    step_record,
)


def add_lease(
    store: Store,
    trajectory_id: str,
    attempt: int,
    *,
    worker: str = "env-0",
    slot: int = 0,
    sampling_seed: int = 1,
    at: float = 1.0,
    max_steps: int = 8,
) -> None:
    """File a trajectory of group g1."""
    store.add_lease(
        trajectory_id,
        group_id="g1",
        attempt=attempt,
        worker=worker,
        slot=slot,
        sampling_seed=sampling_seed,
        at=at,
        max_steps=max_steps,
    )


def fill(store: Store, *, steps: int = 3) -> str:
    """One group with one trajectory of some steps; returns the trajectory's id."""
    store.begin_run(1, "{}", [])
    store.add_group(GroupRow("g1", 1, "mini", "mini/click", 5, 4, "open", "", 1.0, None, None))
    add_lease(store, "g1-00", 0, slot=2, sampling_seed=77)
    for step in range(steps):
        store.add_step(step_record("g1-00", step, version=step), 2.0 + step)
    store.commit()
    return "g1-00"
