"""What a rehearsal reports: a table of the run's parts, what was seen, one line of JSON.

Report   all of it
parts    name -> configured, stood_in or machine_only, with what stands in
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from dart_cli.config.values import shown
from dart_cli.rehearsal.findings import Seen
from dart_cli.rehearsal.plan import Rehearsal

State = Literal["configured", "stood_in", "machine_only"]

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
    "machine_only": "only there",
}


@dataclass(frozen=True)
class Part:
    """One row of the table."""

    name: str
    state: State
    told: str = ""


def parts(plan: Rehearsal) -> Iterator[Part]:
    """All parts of a run, in the order of its data's way."""
    written = plan.written

    def part(name: str, *keys: str, told: str = "") -> Part:
        found = [each for key in keys if (each := plan.changed(key))]
        by = ", ".join(
            f"{c.key} {shown(c.rehearsed)} for {shown(c.written)}{f' ({c.why})' if c.why else ''}"
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
    yield part("suite and environments", "env.slots", "up.envs", told=written.env.suite)
    yield Part("verdicts", "stood_in", "the suite's are given and counted; a coin's are trained on")
    yield Part("action language, prompts, history", "configured", written.policy.codec)
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
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # at least: of the processes whose end was seen
    failed: dict[str, str] | None = None  # part -> what is wrong, and the cure
    seen: Seen | None = None
    doctor: tuple[str, ...] = ()  # its lines for the real sizes
    difference: float | None = None  # nats, of the export, the largest
    compared: int = 0

    def show(self, console: Console) -> None:
        """The table, what was seen, what failed."""
        table = Table(title=f"rehearsal of {self.plan.path}", title_justify="left")
        for name in ("part", "rehearsed", "by"):
            table.add_column(name, overflow="fold")
        for each in parts(self.plan):
            table.add_row(each.name, _COLUMNS[each.state], each.told)
        console.print(table)
        for line in self._lines():
            console.print(line, soft_wrap=True)
        for name, text in (self.failed or {}).items():
            console.print(f"failed: {name}: {text}", soft_wrap=True)

    def _lines(self) -> Iterator[str]:
        seen, written = self.seen, self.plan.written
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
        if self.difference is not None:
            yield (
                f"the export scores {self.compared} stored tokens as the published weights do: the largest "
                f"difference is {self.difference:.1e} nats"
            )
        for line in self.doctor:
            yield f"dart doctor, for the real sizes: {line}"
        yield (
            f"{self.seconds:.0f} s, at least {self.cpu_seconds:.0f} CPU seconds; all of it is in {self.plan.folder}, again by: "
            "dart up CONFIG --rehearse"
        )

    def as_json(self) -> dict[str, Any]:
        """The last line."""
        seen = self.seen
        return {
            "seconds": round(self.seconds, 1),
            "cpu_seconds": round(self.cpu_seconds, 1),
            "parts": {each.name: each.state for each in parts(self.plan)},
            "failed": self.failed or {},
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
            "export_difference": self.difference,
        }
