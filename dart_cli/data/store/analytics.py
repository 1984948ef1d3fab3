"""Aggregate queries, for status, view and inspection: curves, metrics, usage, sizes, times."""

from __future__ import annotations

import json
from typing import Any, Literal

from bus.messages import Outcome
from bus.snapshot import JudgeView, SyncView
from dart_cli.data.store.connection import Connection
from dart_cli.data.store.rows import (
    CountersRow,
    CurvePoint,
    JudgementRow,
    MetricPoint,
    OwnCounts,
    PlayedStep,
    Remainder,
    ReplayCounts,
    SizesRow,
    UsageRow,
)


class Analytics(Connection):
    """Queries for sums and series over a whole run."""

    def counters(self) -> list[CountersRow]:
        """Return the numbers of trajectories by task, state, reason and outcome."""
        rows = self._rows(
            "SELECT g.task_id, t.state, t.reason, t.outcome, COUNT(*) AS trajectories, "
            "COALESCE(SUM(t.steps), 0) AS steps, SUM(t.counted) AS counted, "
            "COALESCE(SUM(t.counted * t.reward), 0.0) AS rewards, "
            "COALESCE(SUM(t.steps > 0), 0) AS acted "
            "FROM trajectories t JOIN groups g ON g.id = t.group_id "
            "GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4"
        )
        return [CountersRow(**row) for row in rows]

    def left_out(self) -> dict[str, int]:
        """Return how many steps of fresh batches are not trained on, by reason."""
        rows = self._rows(
            "SELECT reason, COUNT(*) AS steps FROM batch_samples WHERE weight = 0 GROUP BY 1 ORDER BY 2 DESC"
        )
        return {row["reason"]: row["steps"] for row in rows}

    def remainder(self) -> Remainder:
        """Return how many episodes, trajectories, batches and drops have contradictory records."""
        [row] = self._rows(
            "SELECT (SELECT COUNT(*) FROM trajectories t WHERE t.reason <> 'incomplete' AND t.steps <> "
            "(SELECT COUNT(*) FROM steps s WHERE s.trajectory_id = t.id)) AS steps, "
            "(SELECT COUNT(*) FROM trajectories t WHERE t.state IN ('batched', 'trained') AND t.steps <> "
            "(SELECT COUNT(DISTINCT b.step) FROM batch_samples b "
            "WHERE b.trajectory_id = t.id AND b.batch_id = t.batch_id)) AS samples, "
            "(SELECT COUNT(*) FROM metrics m WHERE m.name = 'samples' AND m.value <> "
            "(SELECT COALESCE(SUM(b.weight <> 0), 0) FROM batch_samples b WHERE b.batch_id = m.step)) "
            "AS batches, "
            "(SELECT COUNT(*) FROM trajectories WHERE state = 'dropped' AND reason = '') AS reasons"
        )
        return Remainder(**row)

    def sizes(self) -> SizesRow:
        """Return the size of the run's parts; blobs and images are not read for it."""
        steps = self._rows(
            "SELECT COUNT(*) AS steps, COALESCE(SUM(LENGTH(token_ids)), 0) / 4 AS tokens, "
            "COALESCE(SUM(LENGTH(prompt_token_ids) + LENGTH(token_ids) + "
            "LENGTH(behaviour_logprobs) + LENGTH(entropies) + LENGTH(text) + LENGTH(patches) + "
            "LENGTH(pointed)), 0) AS step_bytes "
            "FROM steps"
        )[0]
        images = self._rows(
            "SELECT COUNT(*) FILTER (WHERE media_type <> 'routing') AS screenshots, "
            "COALESCE(SUM(LENGTH(bytes)) FILTER (WHERE media_type <> 'routing'), 0) AS screenshot_bytes, "
            "COALESCE(SUM(LENGTH(bytes)) FILTER (WHERE media_type = 'routing'), 0) AS routing_bytes "
            "FROM screenshots"
        )[0]
        return SizesRow(**steps, **images, disk_bytes=self.bytes_on_disk())

    def replay_counts(self) -> ReplayCounts:
        """Return how many updates were replays, and how many batches were refused, by reason."""
        [row] = self._rows(
            "SELECT COUNT(*) AS updates, COUNT(replay_of) - (SELECT COUNT(*) FROM metrics m "
            "JOIN batches b ON b.id = m.step WHERE m.name = 'replay_skipped' AND m.value <> 0 "
            "AND b.state = 'trained') AS replays FROM batches WHERE state = 'trained'"
        )
        refused = self._rows(
            "SELECT reason, COUNT(*) AS number FROM decisions "
            "WHERE subject >= 'batch ' AND subject < 'batch!' AND NOT used GROUP BY 1 ORDER BY 1"
        )
        return ReplayCounts(**row, refused={line["reason"]: line["number"] for line in refused})

    def share_left_out(self, batch_id: int) -> float:
        """Return the share of a fresh batch's steps that have weight 0."""
        rows = self._rows(
            "SELECT AVG(weight = 0) AS share FROM batch_samples WHERE batch_id = ?",
            (batch_id,),
        )
        return rows[0]["share"] or 0.0

    def share_of_pool(self, batch_id: int) -> float:
        """Return the share of a fresh batch's trained tokens that come from members of the pool."""
        rows = self._rows(
            "SELECT SUM((b.reason = 'pool') * LENGTH(s.token_ids)) * 1.0 / SUM(LENGTH(s.token_ids)) "
            "AS share FROM batch_samples b JOIN steps s "
            "ON s.trajectory_id = b.trajectory_id AND s.step = b.step WHERE b.batch_id = ? AND b.weight <> 0",
            (batch_id,),
        )
        return rows[0]["share"] or 0.0

    def longest_successes(self) -> dict[str, int]:
        """Return task id -> steps of its longest success, in the run or ever in the pool."""
        rows = self._rows(
            "SELECT task_id, MAX(steps) AS steps FROM ("
            "SELECT g.task_id, t.steps FROM trajectories t JOIN groups g ON g.id = t.group_id "
            "WHERE t.outcome = 'pass' UNION ALL SELECT task_id, steps FROM pool) GROUP BY task_id"
        )
        return {row["task_id"]: row["steps"] for row in rows}

    def task_progress(self) -> dict[str, str]:
        """Return task id -> its progress as JSON, for each task that has had an outcome."""
        rows = self._rows("SELECT task_id, progress FROM task_progress")
        return {row["task_id"]: row["progress"] for row in rows}

    def own_counts(self) -> OwnCounts:
        """Return the counts of what the policy itself played."""
        [row] = self._rows(
            "WITH last AS (SELECT COALESCE(MAX(ended_at), 0) AS at FROM trajectories "
            "WHERE outcome = 'pass') "
            "SELECT COALESCE(SUM(outcome = 'pass'), 0) AS passed, "
            "(SELECT COUNT(*) FROM steps WHERE trajectory_id IN (SELECT id FROM trajectories)) "
            "AS completions, "
            "COALESCE(SUM(outcome = 'fail' AND ended_at > (SELECT at FROM last)), 0) AS failed_since, "
            "(SELECT COUNT(*) FROM batches WHERE state = 'trained' "
            "AND trained_at <= (SELECT at FROM last)) AS updates_then FROM trajectories"
        )
        return OwnCounts(**row)

    def own_verdicts(
        self, most: int, *, newest: bool = False
    ) -> list[tuple[Outcome, float | None]]:
        """Return outcome and reward of the first `most` trajectories with a verdict, or the newest."""
        rows = self._stream(
            "SELECT outcome, reward FROM trajectories WHERE outcome IN ('pass', 'fail') "  # noqa: S608
            f"ORDER BY rowid {'DESC' if newest else 'ASC'} LIMIT ?",
            (most,),
        )
        verdicts = [(outcome, reward) for outcome, reward in rows]
        return verdicts[::-1] if newest else verdicts

    def own_malformed(self, most: int, *, newest: bool = False) -> list[bool]:
        """Return a list of the policy's first `most` completions, or its newest: True for no action."""
        rows = self._stream(
            "SELECT action IS NULL AND error <> '' FROM steps s WHERE EXISTS "  # noqa: S608
            "(SELECT 1 FROM trajectories t WHERE t.id = s.trajectory_id) "  # not the pool's
            f"ORDER BY rowid {'DESC' if newest else 'ASC'} LIMIT ?",
            (most,),
        )
        flags = [bool(malformed) for (malformed,) in rows]
        return flags[::-1] if newest else flags

    def success_curve(self, *, bucket: int = 1) -> list[CurvePoint]:
        """Return each task's success by policy version, in buckets of `bucket` versions, the oldest first.

        A trajectory is in the bucket of its oldest token. Only trajectories that count for success are
        included (`Group.uncounted`); a mean over all would be too low with data.early_stop.
        """
        rows = self._rows(
            "SELECT g.task_id, (t.oldest_version / ?) * ? AS policy_version, "
            "COUNT(*) AS trajectories, SUM(t.outcome = 'pass') AS passed, "
            "MAX(t.ended_at) AS ended_at "
            "FROM trajectories t JOIN groups g ON g.id = t.group_id "
            "WHERE t.counted AND t.oldest_version >= 0 "
            "GROUP BY 1, 2 ORDER BY 1, 2",
            (bucket, bucket),
        )
        return [CurvePoint(**row) for row in rows]

    def metrics(self, name: str | None = None, after: int = 0) -> list[MetricPoint]:
        """Return the trainer's metrics of batches with an id above `after`, in order of name and batch."""
        clause = "AND name = ?" if name else ""
        rows = self._rows(
            f"SELECT name, step, at, value FROM metrics WHERE step > ? {clause} ORDER BY name, step",  # noqa: S608
            (after, name) if name else (after,),
        )
        return [MetricPoint(**row) for row in rows]

    def metric_curves(self, most: int) -> list[MetricPoint]:
        """Return the trainer's metrics over the whole run, each as at most `most` means over batches."""
        rows = self._rows(
            "WITH buckets AS (SELECT (MAX(step) - 1) / ? + 1 AS size FROM metrics) "
            "SELECT name, MAX(step) AS step, MAX(at) AS at, AVG(value) AS value "
            "FROM metrics, buckets GROUP BY name, (step - 1) / size ORDER BY name, 2",
            (most,),
        )
        return [MetricPoint(**row) for row in rows]

    def staleness(self, after: int = 0, *, replays: bool = False) -> dict[int, int]:
        """Return versions behind the trainer -> how many trained tokens were so far behind.

        Counted are the tokens of fresh batches with an id above `after`, or of such `replays`.
        """
        rows = self._rows(
            "SELECT s.versions_behind, SUM(s.tokens) AS tokens FROM staleness s "
            "JOIN batches b ON b.id = s.batch_id "
            "WHERE s.batch_id > ? AND (b.replay_of IS NOT NULL) = ? GROUP BY 1 ORDER BY 1",
            (after, int(replays)),
        )
        return {row["versions_behind"]: row["tokens"] for row in rows}

    def newest_syncs(self) -> list[SyncView]:
        """Return each rollout worker's newest sync, with the numbers of its syncs and of its refusals."""
        rows = self._rows(
            # SQLite takes the other columns from the row that has the single MAX.
            "SELECT *, MAX(done_at) AS newest, COUNT(*) AS syncs, SUM(error <> '') AS refused "
            "FROM syncs GROUP BY worker ORDER BY worker"
        )
        return [SyncView.model_validate(row) for row in rows]

    def usage(self) -> list[UsageRow]:
        """Return the processes' time by worker and phase."""
        return [UsageRow(**row) for row in self._rows("SELECT * FROM usage ORDER BY worker, phase")]

    def count(self, table: Literal["groups", "trajectories"]) -> dict[tuple[str, str], int]:
        """Return (state, reason) -> number of rows of the table."""
        rows = self._rows(
            f"SELECT state, reason, COUNT(*) AS number FROM {table} GROUP BY state, reason"  # noqa: S608
        )
        return {(row["state"], row["reason"]): row["number"] for row in rows}

    def trajectories_over(self) -> int:
        """Return the number of trajectories that are no longer played, whatever their outcome."""
        rows = self._rows(
            "SELECT COUNT(*) AS number FROM trajectories WHERE state NOT IN ('leased', 'playing')"
        )
        return int(rows[0]["number"])

    def total(self, table: Literal["steps", "screenshots", "batches"]) -> int:
        """Return the number of rows of a table."""
        return int(self._rows(f"SELECT COUNT(*) AS number FROM {table}")[0]["number"])  # noqa: S608

    def bytes_in_use(self) -> int:
        """Return the size of the database without its log and its free pages."""
        pages, free, size = (
            self._rows(f"PRAGMA {name}")[0][name]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def bytes_on_disk(self) -> int:
        """Return the size of the database with its write-ahead log."""
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def judgements(self, trajectory_id: str) -> list[JudgementRow]:
        """Return the judgements of a trajectory, in the order in which they were made."""
        sql = "SELECT * FROM judgements WHERE trajectory_id = ? ORDER BY at, judge"
        return [JudgementRow(**row) for row in self._rows(sql, (trajectory_id,))]

    def judged_by(self, judge: str) -> set[str]:
        """Return the ids of the trajectories that this judge has judged as pass or fail."""
        sql = "SELECT trajectory_id FROM judgements WHERE judge = ? AND outcome != 'invalid'"
        return {row[0] for row in self._stream(sql, (judge,))}

    def played_steps(self, trajectory_id: str) -> list[PlayedStep]:
        """Return a trajectory's steps in order, without those whose text was no action."""
        sql = "SELECT action, more_actions, screenshot FROM steps WHERE trajectory_id = ? ORDER BY step"
        rows = self._stream(sql, (trajectory_id,))
        return [
            PlayedStep([json.loads(action), *json.loads(more or "[]")], shot)
            for action, more, shot in rows
            if action is not None
        ]

    def judge_views(self) -> list[JudgeView]:
        """Return each judge's verdicts compared with the evaluators'.

        A verdict that a judge gave in place of an evaluator is not compared.
        """
        sql = (
            "SELECT j.judge, j.use = 'missing', j.outcome, "
            "CASE WHEN EXISTS (SELECT 1 FROM judgements m WHERE m.trajectory_id = t.id "
            "AND m.use = 'missing') THEN NULL ELSE t.outcome END, "
            "COUNT(*), SUM(j.calls), SUM(j.prompt_tokens), SUM(j.completion_tokens), SUM(j.seconds) "
            "FROM judgements j JOIN trajectories t ON t.id = j.trajectory_id GROUP BY 1, 2, 3, 4"
        )
        by_judge: dict[str, list[tuple[Any, ...]]] = {}
        for judge, *row in self._stream(sql):
            by_judge.setdefault(judge, []).append(tuple(row))
        return [_view(judge, rows) for judge, rows in sorted(by_judge.items())]


def _view(judge: str, rows: list[tuple[Any, ...]]) -> JudgeView:
    """Return the view of one judge.

    The columns of `rows` are: 1 if the judge took the place of an evaluator, the judge's outcome, the
    evaluator's outcome, then numbers of trajectories, calls, prompt tokens, completion tokens and seconds.
    """

    def number(judge_outcome: str, evaluator_outcome: str) -> int:
        pair = (judge_outcome, evaluator_outcome)
        return sum(row[3] for row in rows if not row[0] and row[1:3] == pair)

    verdicts: dict[str, int] = {}
    for row in rows:
        if row[0]:
            verdicts[row[1]] = verdicts.get(row[1], 0) + row[3]
    return JudgeView(
        judge=judge,
        verdicts=verdicts,
        both_pass=number("pass", "pass"),
        both_fail=number("fail", "fail"),
        judge_alone=number("pass", "fail"),
        evaluator_alone=number("fail", "pass"),
        judged=sum(row[3] for row in rows),
        unanswered=sum(row[3] for row in rows if row[1] == "invalid"),
        calls=sum(row[4] for row in rows),
        prompt_tokens=sum(row[5] for row in rows),
        completion_tokens=sum(row[6] for row in rows),
        seconds=sum(row[7] for row in rows),
    )
