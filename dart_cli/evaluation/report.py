"""The result of an evaluation from its episodes.

evaluation_of  scores, protocol, notes and all episodes as one Evaluation
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from dart_cli.config.schema import Config
from dart_cli.evaluation import protocols
from dart_cli.evaluation.episodes import EpisodeStore
from dart_cli.evaluation.estimates import METHOD, mode_score
from dart_cli.evaluation.player import Plan
from dart_cli.evaluation.results import SCHEMA, EpisodeRow, Evaluation, Mode


def evaluation_of(
    config: Config,
    store: EpisodeStore,
    plan: Plan,
    modes: Sequence[Mode],
    *,
    name: str,
    weights: str,
    policy_version: int,
    dart: str,
    left_out: Mapping[str, str],
) -> Evaluation:
    """All episodes of the plan, which are over, as one result."""
    trained = [task.id for task in plan.trained]
    composed = [task.id for task in plan.composed]
    rows = {mode: store.rows(mode) for mode in modes}
    every = [row for part in rows.values() for row in part]
    limits = [task.max_steps for task in plan.by_id.values()]
    return Evaluation(
        schema_version=SCHEMA,
        name=name,
        model=config.model.path,
        weights=weights,
        policy_version=policy_version,
        seed=config.eval.seed,
        wall_s=store.wall_s(),
        modes={
            mode: mode_score(part, trained, composed, config.eval.attempts)
            for mode, part in rows.items()
        },
        attempts=config.eval.attempts,
        settings=store.settings,
        protocol=protocols.check(config, every, limits),
        dart=dart,
        finished_at=time.time(),
        interval_method=METHOD,
        left_out=dict(left_out),
        notes=list(_notes(every, policy_version)),
        episodes=every,
    )


def _notes(rows: Sequence[EpisodeRow], policy_version: int) -> Iterator[str]:
    versions = {version for row in rows if row.mode != "random" for version in row.versions}
    if versions - {policy_version}:
        told = ", ".join(f"v{each}" for each in sorted(versions))
        yield f"weights of several versions have answered ({told}): these scores are of none of them"
    again = sum(row.tries > 1 for row in rows)
    if again:
        yield f"{again} episodes were played again, as earlier starts left them invalid or unfinished"
