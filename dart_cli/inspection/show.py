"""One trajectory of a run: its steps, times and verdict: `dart data show`.

show_trajectory    all of it but its tokens and images
print_trajectory   the same as a page
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean

from rich.console import Console

from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import SampleRow, StepRow
from dart_cli.evaluation.marks import action_words
from dart_cli.inspection.find import Subject, run_dir_of
from dart_cli.inspection.ls import trajectory_json
from dart_cli.inspection.text import Json, seconds, versions_words
from dart_cli.policy.pointer.patches import drawn, drawn_patches
from dart_cli.runtime.tables import moment, or_dash, page_table, verdict_words

_TEXT_LINES = 12
"""Shown of the text beside a screenshot."""


def show_trajectory(reader: Reader, subject: Subject) -> Json:
    """All of one trajectory but its tokens and images."""
    used: dict[int, SampleRow] = {}
    forks: dict[int, SampleRow] = {}
    for row in reader.sample_rows(subject.id):
        (forks if row.is_fork else used)[row.step] = row
    steps = reader.steps(subject.id)
    trajectory, group = subject.trajectory, subject.group
    return {
        **({} if trajectory is None or group is None else trajectory_json(trajectory, group)),
        "id": subject.id,
        "task": subject.task_id,
        "seed": subject.task_seed,
        "instruction": reader.instruction(subject.suite, subject.task_id, [subject.id]),
        "pool": None if subject.pool is None else asdict(subject.pool),
        "judgements": [asdict(row) for row in reader.judgements(subject.id)],
        "again_in": [
            batch.id
            for first in sorted({row.batch_id for row in used.values()})
            for batch in reader.replays(first)
        ],
        "trajectory_steps": [
            _step_json(step, used.get(step.step), forks.get(step.step)) for step in steps
        ],
    }


def _step_json(step: StepRow, sample: SampleRow | None, fork: SampleRow | None) -> Json:
    return {
        "step": step.step,
        "text": step.text,
        "action": step.action,
        "error": step.error,
        "reward": step.reward,
        "observed_text": step.observed_text,
        "prompt_tokens": len(step.prompt_token_ids),
        "tokens": len(step.sampled.token_ids),
        "logprob": _mean(drawn(step.sampled.behaviour_logprobs, step.sampled.patches)),
        "entropy": _mean(drawn(step.sampled.entropies, step.sampled.patches)),
        "patches": [asdict(each) for each in drawn_patches(step.sampled, step.pointed)],
        "versions": sorted({span.version for span in step.sampled.version_spans}),
        "model_s": step.model_s,
        "env_s": step.env_s,
        "worker": step.worker,
        "at": step.at,
        "screenshot": step.screenshot,
        "weight": None if sample is None else sample.weight,
        "advantage": None if sample is None else sample.advantage,
        "outcome_advantage": None if sample is None else sample.outcome_advantage,
        "screen_advantage": None if sample is None else sample.screen_advantage,
        "baseline": None if sample is None else sample.baseline,
        "reason": None if sample is None else sample.reason,
        "fork": None
        if fork is None
        else {
            "trajectory": fork.fork_trajectory_id,
            "step": fork.fork_step,
            "advantage": fork.advantage,
        },
        "gap_mean": None if sample is None else sample.gap_mean,
        "gap_largest": None if sample is None else sample.gap_largest,
    }


def print_trajectory(console: Console, reader: Reader, subject: Subject, shown: Json) -> None:
    """One trajectory as a page."""
    console.print(f"{shown['id']}  {shown['task']}, seed {shown['seed']}  ({run_dir_of(reader)})")
    if shown["instruction"]:
        console.print(f'  "{shown["instruction"]}"', soft_wrap=True)
    for line in _headlines(shown):
        console.print(f"  {line}")
    # The shipped suites repeat the verdict's reward at the last step: that says nothing new.
    rewarded = any(step["reward"] for step in shown["trajectory_steps"][:-1])
    reward = ("reward",) if rewarded else ()
    columns = (
        "step",
        "text",
        "action",
        *reward,
        "log-prob",
        "entropy",
        "model s",
        "env s",
        "trained",
    )
    right = ("step", "reward", "log-prob", "entropy", "model s", "env s")
    table = page_table("steps", *columns, right=right)
    for step in shown["trajectory_steps"]:
        table.add_row(
            str(step["step"]),
            step["text"],
            action_words(step["action"]) if step["action"] else f"none: {step['error']}",
            *((or_dash(step["reward"], ".3g"),) if rewarded else ()),
            or_dash(step["logprob"], ".3f"),
            or_dash(step["entropy"], ".3f"),
            f"{step['model_s']:.3f}",
            f"{step['env_s']:.3f}",
            _trained(step),
        )
    console.print(table)
    for step in shown["trajectory_steps"]:
        for each in step["patches"]:
            console.print(f"step {step['step']}, token {each['token']}: {_patch_words(each)}")
    for step in shown["trajectory_steps"]:
        if text := step["observed_text"]:
            console.print(f"step {step['step']}, beside the screenshot ({len(text)} characters):")
            console.print(_first_lines(text), markup=False, soft_wrap=True)
    if subject.trajectory is not None:
        console.print(f"what happened to it: dart data why {subject.id} --run {run_dir_of(reader)}")


def _patch_words(each: Json) -> str:
    where = "" if each["row"] is None else f" (row {each['row']}, column {each['column']})"
    logprob, entropy = or_dash(each["logprob"], ".3f"), or_dash(each["entropy"], ".3f")
    return f"patch {each['patch']}{where}, log-prob {logprob}, entropy {entropy}"


def _first_lines(text: str) -> str:
    """The beginning of a long text, indented."""
    lines = ["".join(c if c.isprintable() else "?" for c in line) for line in text.splitlines()]
    more = (
        [f"... {len(lines) - _TEXT_LINES} more lines: --json"] if len(lines) > _TEXT_LINES else []
    )
    return "\n".join(f"  {line}" for line in (*lines[:_TEXT_LINES], *more))


def _headlines(shown: Json) -> list[str]:
    lines = []
    if "state" in shown:
        dropped = f" ({shown['reason']})" if shown["reason"] else ""
        batch = f", batch {shown['batch']}" if shown["batch"] is not None else ""
        if shown["again_in"]:
            batch += f" and again in {', '.join(map(str, shown['again_in']))}"
        lines.append(
            f"{shown['state']}{dropped}{batch}; {versions_words(shown['oldest_version'], shown['newest_version'])}; "
            f"leased {moment(shown['leased_at'])} by {shown['worker']}"
        )
        if shown["outcome"]:
            lines.append(
                f"{verdict_words(shown['outcome'], shown['reward'])} after {shown['steps']} steps and {seconds(shown['wall_s'])} s: "
                f"{shown['verdict']} (stopped: {shown['stop_reason']})"
            )
    lines += [
        f"judge {said['judge']} ({said['use']}): {verdict_words(said['outcome'], said['score'])} after "
        f"{said['calls']} calls and {seconds(said['seconds'])} s: {said['reason'] or '-'}"
        for said in shown["judgements"]
    ]
    if pool := shown["pool"]:
        known = "known" if pool["known"] else "unknown"
        lines.append(
            f"in the pool since {moment(pool['added_at'])}, source {pool['source']}, "
            f"{pool['steps']} steps, log-probabilities {known}, used in {pool['used']} batches"
        )
    return lines


def _trained(step: Json) -> str:
    fork = step["fork"]
    forked = "" if fork is None else f"; fork: {fork['trajectory']} step {fork['step']}"
    if step["weight"] is None:
        return "-"
    if step["weight"] == 0:
        return f"left out: {step['reason']}{forked}"
    parts = ""
    if step["screen_advantage"]:
        outcome, screen = step["outcome_advantage"], step["screen_advantage"]
        parts = f" (outcome {outcome:+.2f}, screen {screen:+.2f})"
    if step["baseline"] is not None:
        parts = f" (expected {step['baseline']:.2f})"
    weight = "" if step["weight"] == 1 else f", weight {step['weight']:.3g}"
    return f"advantage {step['advantage']:+.2f}{parts}{weight}{forked}"


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
