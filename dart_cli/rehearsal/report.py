"""What a rehearsal reports: a table of the run's parts, what was seen, one line of JSON.

Report   all of it
parts    name -> configured, stood_in, not_played or machine_only, with what stands in
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from dart_cli.config.values import short_value
from dart_cli.rehearsal.findings import Seen
from dart_cli.rehearsal.plan import Rehearsal
from dart_cli.rehearsal.stages import (
    COMPARED,
    EPISODE,
    EVALUATION,
    PUBLICATION,
    RESUME,
    UPDATE,
    Player,
)
from dart_cli.rehearsal.stopping import LACK, Stopped

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
"""Parts that need the real machine, and the checks of scripts/gpu-check that cover them."""
_COLUMNS: dict[State, str] = {
    "configured": "as configured",
    "stood_in": "stood in for",
    "not_played": "not played",
    "machine_only": "only there",
}


PROOFS = {
    **dict.fromkeys(("model", "tokenizer and chat template", "suite and environments"), EPISODE),
    **dict.fromkeys(("verdicts", "action language, prompts, history", "engine"), EPISODE),
    **dict.fromkeys(("groups and batches", "trainer, ranks"), UPDATE),
    "kill and resume from a checkpoint": RESUME,
    "weight channel": PUBLICATION,
    "evaluation": EVALUATION,
    "export": COMPARED,
}
"""Parts of the table, and what proves each."""


@dataclass(frozen=True)
class Part:
    """One row of the table."""

    name: str
    state: State
    told: str = ""


def parts(plan: Rehearsal, left_out: Mapping[str, str]) -> Iterator[Part]:
    """Yield all parts of a run, in the order of its data's way; those that are `left_out` with the reason."""
    for each in _rehearsed(plan):
        why = left_out.get(PROOFS.get(each.name, ""))
        yield each if why is None else Part(each.name, "not_played", why)


def _rehearsed(plan: Rehearsal) -> Iterator[Part]:
    """Yield the same as they are when they are played."""
    written = plan.written

    def part(name: str, *keys: str, told: str = "") -> Part:
        found = [each for key in keys if (each := plan.changed(key))]
        by = ", ".join(
            f"{c.key} {short_value(c.rehearsed)} for {short_value(c.written)}{f' ({c.why})' if c.why else ''}"
            for c in found
        )
        return Part(name, "stood_in" if found else "configured", by or told)

    if plan.numbers[0]:
        whole, small = plan.numbers
        of = f"the published shape of {plan.published}" if plan.published else written.model.path
        told = f"{small / 1e6:.1f} M random numbers for {whole / 1e9:.2f} G: {of}, writing clicks"
        yield Part("model", "stood_in", told)
        yield Part(
            "tokenizer and chat template",
            "stood_in" if plan.published else "configured",
            "ours: texts are a fifth longer or more, screens as long" if plan.published else "",
        )
    else:
        yield Part("model", "configured", written.model.path)
        yield Part("tokenizer and chat template", "configured")
    yield part(
        "suite and environments", "env.options", "env.slots", "up.envs", told=written.env.suite
    )
    yield Part("verdicts", "stood_in", "the suite's are given and counted; a coin's are trained on")
    images = ("policy.history_images", "policy.history_images_most")
    yield part("action language, prompts, history", *images, told=written.policy.action_parser)
    yield part(
        "engine", "rollout.engine", "up.rollouts", "rollout.max_batch", told=written.rollout.engine
    )
    yield part("groups and batches", "data.group_size", "data.groups_per_batch", "data.pool_ratio")
    lora = written.model.lora
    how = [f"LoRA of rank {lora.rank}"] if lora else []
    how += ["recompute"] if written.train.recompute == "layer" else []
    yield part("trainer, ranks", "train.ranks", "model.dtype", told=", ".join(how))
    yield part("kill and resume from a checkpoint", "train.checkpoint_every")
    yield part("weight channel", "weights.channel", told=written.weights.channel)
    yield part("evaluation", "eval.episodes")
    yield Part("export", "configured")
    for name, checks in MACHINE_ONLY.items():
        covered = f"scripts/gpu-check: {', '.join(checks)}" if checks else "nothing covers it here"
        yield Part(name, "machine_only", covered)


@dataclass
class Report:
    """One rehearsal's."""

    plan: Rehearsal
    player: Player
    failed: dict[str, str] = field(default_factory=dict)  # part -> what is wrong, and the cure
    part: str = ""  # that is played
    stopped: Stopped | None = None
    cpu_seconds: float = 0.0  # at least: of the processes whose end was seen
    seen: Seen | None = None
    doctor: Mapping[str, str] = field(default_factory=dict)  # its lines for the real sizes

    def show(self, console: Console) -> None:
        """Print the tables, what was seen, what was not played, what failed; no line is wider than the console."""
        table = _table(f"rehearsal of {self.plan.path}", "part", "rehearsed", "by")
        for each in parts(self.plan, self.player.left_out):
            table.add_row(each.name, _COLUMNS[each.state], each.told)
        console.print(table)
        if self.doctor:
            table = _table("dart doctor, for the real sizes", "of", "it takes")
            for name, text in self.doctor.items():
                table.add_row(name, text)
            console.print(table)
        for line in self._lines():
            console.print(line)
        for name, text in self.failed.items():
            console.print(f"failed: {name}: {text}")

    def _lines(self) -> Iterator[str]:
        seen, written, player = self.seen, self.plan.written, self.player
        if player.chosen:
            yield player.chosen
        if seen is not None:
            limit = written.vllm.max_model_len
            yield (
                f"prompts of up to {seen.longest} tokens"
                f"{f', vllm.max_model_len = {limit}' if limit else ''}; "
                f"{seen.episodes} episodes of {seen.steps / max(1, seen.episodes):.1f} steps on average, "
                f"{seen.malformed} ended by malformed text, {seen.invalid} invalid; the suite's own verdicts: "
                f"{seen.judged.get('pass', 0)} pass, {seen.judged.get('fail', 0)} fail; a version has "
                f"{seen.version_bytes / 1e6:.1f} MB"
            )
        if player.difference is not None:
            yield (
                f"the export scores {player.compared} stored tokens as the published weights do: the largest "
                f"difference is {player.difference:.1e} nats"
            )
        if self.part and self.stopped is not None:
            yield f"{self.stopped.why}, in the part: {self.part}"
        for part, why in player.left_out.items():
            yield f"not played: {part}, {why}"
        yield (
            f"{player.budget.spent_s:.0f} of {player.budget.seconds:.0f} s, at least {self.cpu_seconds:.0f} CPU "
            f"seconds; all of it is in {self.plan.folder}, again by: dart up CONFIG --rehearse"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the last line."""
        seen, player = self.seen, self.player
        return {
            "seconds": round(player.budget.spent_s, 1),
            "budget_s": player.budget.seconds,
            "cpu_seconds": round(self.cpu_seconds, 1),
            "parts": {each.name: each.state for each in parts(self.plan, player.left_out)},
            "failed": self.failed,
            "stopped": "" if self.stopped is None else self.stopped.why,
            "proved": {part: round(at, 1) for part, at in player.proved.items()},
            "not_played": player.left_out,
            "reduced": [each.key for each in self.plan.changes if each.why == LACK],
            "changes": {
                each.key: [str(each.written), str(each.rehearsed)]
                for each in self.plan.changes
                if each.written != each.rehearsed
            },
            "longest_prompt": None if seen is None else seen.longest,
            "max_model_len": self.plan.written.vllm.max_model_len,
            "steps_per_episode": None if seen is None else seen.steps / max(1, seen.episodes),
            "malformed": None if seen is None else seen.malformed / max(1, seen.episodes),
            "invalid": None if seen is None else seen.invalid,
            "version_bytes": None if seen is None else seen.version_bytes,
            "export_difference": player.difference,
        }


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
