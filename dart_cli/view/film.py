"""One trajectory as a filmstrip: each screen with its action, the completion, its weight in batches.

frames        the steps of a trajectory, ready for the template
credited      what each step's advantage is made of, where it has several parts
final_screen  the screen after the last action
screens       screenshots by content hash -> address and size
spans         completion tokens by the weights that sampled them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

from markupsafe import Markup

from bus.messages import PointerCandidate
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import SampleRow, StepRow, TrajectoryRow
from dart_cli.evaluation.marks import action_words
from dart_cli.inspection.explain import LEFT_OUT
from dart_cli.policy.pointer.patches import DrawnPatch, drawn, drawn_patches
from dart_cli.view.charts import VERSION_COLOURS, token_bars
from dart_cli.view.screens import action_marks, heat_marks, image_size
from dart_cli.view.site import Site

_ACTION_WORD = "Action:"


@dataclass(frozen=True)
class ShownScreenshot:
    """A screenshot that can be shown."""

    href: str
    width: int  # pixels
    height: int

    @property
    def is_small(self) -> bool:
        """Whether enlarging should keep its pixels sharp."""
        return self.width < 400


@dataclass(frozen=True)
class Span:
    """Completion tokens [start, end) of one version."""

    version: int
    start: int
    end: int
    kind: str  # class of view.css: the version's colour
    logprob: float | None  # mean, nats
    least: float | None  # of the least likely token, nats
    entropy: float | None  # mean, nats


@dataclass(frozen=True)
class BatchUse:
    """A step's advantage and weight in one batch."""

    step: int
    batch: int
    advantage: float
    outcome: float  # the part of the advantage that the trajectory's outcome gives
    screen: float  # the part that compares steps on one screen
    baseline: float | None  # reward that the trackers expected here; None without trackers
    teacher: str  # of a fork the trajectory whose completion is trained on; else empty
    teacher_step: int | None
    weight: float
    reason: str
    why: str  # in words where it is left out
    gap_mean: float | None  # trainer minus engine, mean over tokens, nats; None if unknown
    gap_largest: float | None  # of the absolute differences


@dataclass(frozen=True)
class StepView:
    """One step."""

    row: StepRow
    screen: ShownScreenshot | None  # None where the image is gone
    marks: Markup
    thought: str  # what stands before the action, as the model wrote it
    said: str  # the action as the model wrote it
    did: str  # the action as it was carried out; empty where it was none
    spans: list[Span]
    logprob: float | None  # mean over tokens, nats
    entropy: float | None
    logprob_bars: Markup
    entropy_bars: Markup
    uses: list[BatchUse]
    patches: list[DrawnPatch]  # of its pointers, in order
    heat: Markup  # where they looked
    candidates: list[tuple[int, PointerCandidate]]  # their regions, the best of each pointer first


def frames(
    reader: Reader, site: Site, rows: Sequence[StepRow], samples: Sequence[SampleRow]
) -> list[StepView]:
    """The steps `rows` with their weights in batches."""
    shown = screens(reader, site, [row.screenshot for row in rows])
    colours = _colours(row for row in rows)
    uses: dict[int, list[BatchUse]] = {}
    for sample in samples:
        uses.setdefault(sample.step, []).append(_use(sample))
    return [_frame(row, shown.get(row.screenshot), colours, uses.get(row.step, [])) for row in rows]


def credited(shown: Iterable[StepView]) -> list[BatchUse]:
    """All uses of the steps, where some advantage is more than its trajectory's outcome."""
    uses = [use for step in shown for use in step.uses]
    return uses if any(use.screen or use.teacher for use in uses) else []


def final_screen(reader: Reader, site: Site, row: TrajectoryRow | None) -> ShownScreenshot | None:
    """The screen after the last action, where there is one."""
    if row is None or row.final_screenshot is None:
        return None
    return screens(reader, site, [row.final_screenshot]).get(row.final_screenshot)


def screens(reader: Reader, site: Site, hashes: Iterable[str]) -> dict[str, ShownScreenshot]:
    """Address and size of each image that exists and can be shown, by content hash."""
    found = {}
    for key, image in reader.screenshots(hashes).items():
        if (size := image_size(image)) is not None:
            found[key] = ShownScreenshot(site.image(key), *size)
    return found


def spans(row: StepRow, colours: Mapping[int, str]) -> list[Span]:
    """The step's tokens by version; one span of version -1 where versions are not known."""
    ranges = [(span.version, span.start, span.end) for span in row.sampled.version_spans]
    forced = {at - 1 for at, patch in enumerate(row.sampled.patches) if patch >= 0}

    def of_span(values: Sequence[float], start: int, end: int) -> list[float]:
        """Those of the tokens that were drawn."""
        return [value for at, value in enumerate(values[start:end], start) if at not in forced]

    return [
        Span(
            version=version,
            start=start,
            end=end,
            kind=colours.get(version, "v0"),
            logprob=_mean(of_span(row.sampled.behaviour_logprobs, start, end)),
            least=min(filter(isfinite, row.sampled.behaviour_logprobs[start:end]), default=None),
            entropy=_mean(of_span(row.sampled.entropies, start, end)),
        )
        for version, start, end in ranges or [(-1, 0, len(row.sampled.token_ids))]
    ]


# --- parts ----------------------------------------------------------------------------------


def _frame(
    row: StepRow, screen: ShownScreenshot | None, colours: Mapping[int, str], uses: list[BatchUse]
) -> StepView:
    parts = spans(row, colours)
    thought, action, said = row.text.rpartition(_ACTION_WORD)
    kinds = ["v0"] * len(row.sampled.token_ids)
    for span in parts:
        kinds[span.start : span.end] = [span.kind] * (span.end - span.start)
    return StepView(
        row=row,
        screen=screen,
        marks=Markup("") if screen is None else action_marks(row.action, screen.width),
        heat=Markup("") if screen is None else heat_marks(row.pointed, screen.width, screen.height),
        candidates=[
            (nth, each) for map_ in row.pointed for nth, each in enumerate(map_.candidates, 1)
        ],
        thought=thought.strip() if action else "",
        said=f"{action} {said.strip()}".strip(),
        did=action_words(row.action) if row.action else "",
        spans=parts,
        logprob=_mean(drawn(row.sampled.behaviour_logprobs, row.sampled.patches)),
        entropy=_mean(drawn(row.sampled.entropies, row.sampled.patches)),
        logprob_bars=_bars(
            row.sampled.behaviour_logprobs, kinds, "log-probability of each token, nats"
        ),
        entropy_bars=_bars(row.sampled.entropies, kinds, "entropy of each token, nats"),
        uses=uses,
        patches=drawn_patches(row.sampled, row.pointed),
    )


def _bars(values: Sequence[float], kinds: Sequence[str], label: str) -> Markup:
    return token_bars(values, kinds[: len(values)], label=label)


def _use(row: SampleRow) -> BatchUse:
    why = LEFT_OUT.get(row.reason, "") if row.weight == 0 else ""
    return BatchUse(
        step=row.step,
        batch=row.batch_id,
        advantage=row.advantage,
        outcome=row.outcome_advantage,
        screen=row.screen_advantage,
        baseline=row.baseline,
        teacher=row.fork_trajectory_id,
        teacher_step=row.fork_step,
        weight=row.weight,
        reason=row.reason or "mixed",
        why=why,
        gap_mean=row.gap_mean,
        gap_largest=row.gap_largest,
    )


def _colours(rows: Iterable[StepRow]) -> dict[int, str]:
    """Version -> class, in the order of the versions."""
    known = sorted({span.version for row in rows for span in row.sampled.version_spans})
    return {version: f"v{index % VERSION_COLOURS}" for index, version in enumerate(known)}


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if isfinite(value)]
    return fmean(known) if known else None
