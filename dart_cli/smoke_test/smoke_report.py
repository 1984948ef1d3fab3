"""The report of a smoke test: a table of the run's parts, counts of what was played, one line of JSON.

Report   everything that the report is made of
parts    the rows of the table: each part is configured, stood_in, not_played or machine_only
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from dart_cli.config.rules import Finding
from dart_cli.config.values import short_value
from dart_cli.runtime.findings import sentence
from dart_cli.smoke_test.config_changes import SmokeTestPlan
from dart_cli.smoke_test.interruption import LACK_OF_TIME, Interruption
from dart_cli.smoke_test.parts_player import (
    EPISODE,
    EVALUATION,
    EXPORT_COMPARISON,
    PUBLICATION,
    RESUME,
    UPDATE,
    Player,
)
from dart_cli.smoke_test.stored_run import StoredRun

State = Literal["configured", "stood_in", "not_played", "machine_only"]

MACHINE_ONLY = {
    "attention and other kernels": ("attention", "model"),
    "updates of full width in a GPU's memory": ("update", "one_by_one", "lora"),
    "engine against trainer on the GPU": ("parity",),
    "weights to files, and back to the GPU": ("publication",),
    "all processes of a run on one GPU": ("loop", "tests"),
    "several GPUs, NCCL, vLLM on a GPU": ("vllm", "two_gpus"),
    "speed": (),
}
"""Parts that need the real machine -> checks of scripts/gpu-check that cover them."""
_COLUMNS: dict[State, str] = {
    "configured": "as configured",
    "stood_in": "substitute",
    "not_played": "not played",
    "machine_only": "real machine only",
}


PROOFS = {
    **dict.fromkeys(("model", "tokenizer and chat template", "suite and environments"), EPISODE),
    **dict.fromkeys(("verdicts", "action language, prompts, history", "engine"), EPISODE),
    **dict.fromkeys(("groups and batches", "trainer, ranks"), UPDATE),
    "kill and resume from a checkpoint": RESUME,
    "weight channel": PUBLICATION,
    "evaluation": EVALUATION,
    "export": EXPORT_COMPARISON,
}
"""Part of the table -> the part of the run that proves it."""


@dataclass(frozen=True)
class Part:
    """A row of the table."""

    name: str
    state: State
    detail: str = ""


def parts(plan: SmokeTestPlan, left_out: Mapping[str, str]) -> Iterator[Part]:
    """Yield all parts of a run in the order of the data's path.

    `left_out` has the reasons of parts that were not played.
    """
    for row in _all_parts(plan):
        why = left_out.get(PROOFS.get(row.name, ""))
        yield row if why is None else Part(row.name, "not_played", why)


def _all_parts(plan: SmokeTestPlan) -> Iterator[Part]:
    """Yield all parts of a run as if each were played."""
    original = plan.original

    def part(name: str, *keys: str, detail: str = "") -> Part:
        changes = [change for key in keys if (change := plan.change_of(key))]
        by = ", ".join(
            f"{change.key} {short_value(change.replacement)} for {short_value(change.original)}"
            + (f" ({change.why})" if change.why else "")
            for change in changes
        )
        return Part(name, "stood_in" if changes else "configured", by or detail)

    if plan.parameters[0]:
        whole, small = plan.parameters
        of = f"the published shape of {plan.published}" if plan.published else original.model.path
        detail = (
            f"{small / 1e6:.1f} M random parameters for {whole / 1e9:.2f} G: {of}, writing clicks"
        )
        yield Part("model", "stood_in", detail)
        yield Part(
            "tokenizer and chat template",
            "stood_in" if plan.published else "configured",
            "trained by dart: texts have a fifth more tokens or more, screens as many"
            if plan.published
            else "",
        )
    else:
        yield Part("model", "configured", original.model.path)
        yield Part("tokenizer and chat template", "configured")
    yield part(
        "suite and environments", "env.options", "env.slots", "up.envs", detail=original.env.suite
    )
    yield Part(
        "verdicts", "stood_in", "the suite's verdicts are counted; the training uses a coin's"
    )
    images = ("policy.history_images", "policy.history_images_most")
    yield part("action language, prompts, history", *images, detail=original.policy.action_parser)
    yield part(
        "engine",
        "rollout.engine",
        "up.rollouts",
        "rollout.max_batch",
        detail=original.rollout.engine,
    )
    yield part("groups and batches", "data.group_size", "data.groups_per_batch", "data.pool_ratio")
    lora = original.model.lora
    how = [f"LoRA of rank {lora.rank}"] if lora else []
    how += ["recompute"] if original.train.recompute == "layer" else []
    yield part("trainer, ranks", "train.ranks", "model.dtype", detail=", ".join(how))
    yield part("kill and resume from a checkpoint", "train.checkpoint_every")
    yield part("weight channel", "weights.channel", detail=original.weights.channel)
    yield part("evaluation", "eval.episodes")
    yield Part("export", "configured")
    for name, checks in MACHINE_ONLY.items():
        covered = f"scripts/gpu-check: {', '.join(checks)}" if checks else "nothing covers it here"
        yield Part(name, "machine_only", covered)


@dataclass
class Report:
    """The report of one smoke test."""

    plan: SmokeTestPlan
    player: Player
    errors: list[Finding] = field(default_factory=list)
    part: str = ""  # the one that is being played
    interruption: Interruption | None = None
    seconds: float = 0.0  # that it took
    cpu_seconds: float = 0.0  # of the processes that were waited for, so a lower bound
    run: StoredRun | None = None  # None as long as it is not read
    doctor: Mapping[str, str] = field(default_factory=dict)
    """Lines of the doctor's plan for the real sizes, by subject."""

    def add(self, finding: Finding) -> None:
        """Add an error."""
        self.errors.append(finding)

    def show(self, console: Console) -> None:
        """Print the tables, the counts, what was not played and what failed.

        No line is wider than the console.
        """
        table = _table(f"smoke test of {self.plan.path}", "part", "played", "how")
        for row in parts(self.plan, self.player.left_out):
            table.add_row(row.name, _COLUMNS[row.state], row.detail)
        console.print(table)
        if self.doctor:
            table = _table("dart doctor, for the real sizes", "subject", "it takes")
            for name, text in self.doctor.items():
                table.add_row(name, text)
            console.print(table)
        for line in self._lines():
            console.print(line)
        for finding in self.errors:
            console.print(f"failed: {finding.subject}: {sentence(finding)}")

    def _lines(self) -> Iterator[str]:
        """Yield the lines below the tables: counts, what was not played, the time."""
        run, original, player = self.run, self.plan.original, self.player
        if player.size_note:
            yield player.size_note
        if run is not None:
            limit = original.vllm.max_model_len
            yield (
                f"prompts of up to {run.longest} tokens"
                f"{f', vllm.max_model_len = {limit}' if limit else ''}; "
                f"{run.episodes} episodes of {run.steps / max(1, run.episodes):.1f} steps on average, "
                f"{run.malformed} ended by malformed text, {run.invalid} invalid; the suite's own verdicts: "
                f"{run.suite_outcomes.get('pass', 0)} pass, {run.suite_outcomes.get('fail', 0)} fail; a weight version has "
                f"{run.version_bytes / 1e6:.1f} MB"
            )
        if player.differences is not None:
            yield (
                f"the export scores {player.differences.tokens} stored tokens like the published weights: the largest "
                f"difference is {player.differences.largest:.1e} nats"
            )
        if self.part and self.interruption is not None:
            yield f"{self.interruption.why}, in the part: {self.part}"
        for part, why in player.left_out.items():
            yield f"not played: {part}, {why}"
        yield (
            f"{self.seconds:.0f} of {player.budget.seconds:.0f} s, at least {self.cpu_seconds:.0f} CPU "
            f"seconds; everything is in {self.plan.folder}; repeat with: dart up CONFIG --smoke-test"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the values of the last line, which is JSON."""
        run, player = self.run, self.player
        return {
            "seconds": round(self.seconds, 1),
            "budget_s": player.budget.seconds,
            "cpu_seconds": round(self.cpu_seconds, 1),
            "parts": {row.name: row.state for row in parts(self.plan, player.left_out)},
            "failed": {finding.subject: sentence(finding) for finding in self.errors},
            "stopped": "" if self.interruption is None else self.interruption.why,
            "proved": {part: round(at, 1) for part, at in player.proved.items()},
            "not_played": player.left_out,
            "reduced": [change.key for change in self.plan.changes if change.why == LACK_OF_TIME],
            "changes": {
                change.key: [str(change.original), str(change.replacement)]
                for change in self.plan.changes
                if change.original != change.replacement
            },
            "longest_prompt": None if run is None else run.longest,
            "max_model_len": self.plan.original.vllm.max_model_len,
            "steps_per_episode": None if run is None else run.steps / max(1, run.episodes),
            "malformed": None if run is None else run.malformed / max(1, run.episodes),
            "invalid": None if run is None else run.invalid,
            "version_bytes": None if run is None else run.version_bytes,
            "export_difference": player.differences and player.differences.largest,
        }


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
