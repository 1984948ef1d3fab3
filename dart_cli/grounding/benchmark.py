"""Runs a grounding benchmark in this process: `dart eval grounding`.

run_grounding   reads the set, asks the model, prints the scores, and writes answers and a page of misses
Settings        everything that the answers depend on; a second start with other settings is refused
AnswersFolder   the folder with the answers so far, one line for each item

The files in OUT: settings.json, answers.jsonl, report.json, misses.html.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from pydantic import TypeAdapter
from rich.console import Console

from bus.errors import ConfigError, EngineError, UserError
from dart_cli.config.model_folder import model_problem, screens_of
from dart_cli.config.schema import MODEL_ENGINES, Config
from dart_cli.grounding import GroundingOptions
from dart_cli.grounding.formats import (
    AnswerFormat,
    folder_of,
    grounding_config,
    opening_of,
)
from dart_cli.grounding.items import Answer, Item, pictures_digest
from dart_cli.grounding.misses import misses_page
from dart_cli.grounding.reader import GroundingSet, read_set
from dart_cli.grounding.scorers import (
    VerifiedScorer,
    answer_all,
    make_scorer,
    verifier_config,
    verifier_scoring,
)
from dart_cli.grounding.scores import (
    FIRST,
    Report,
    is_hit,
    refusal_lines,
    report_tables,
    score,
    summary,
)
from dart_cli.language.parsers import action_parser_identity
from dart_cli.player.chosen_model import chosen_weights, loaded_model
from dart_cli.runtime.background import run_until_stopped
from dart_cli.runtime.role import end_with_parent, limit_threads
from dart_cli.runtime.tables import fraction, progress
from dart_cli.runtime.waits import OpenWaits
from dart_cli.runtime.work_folder import JsonLines, WorkFolder, WorkSettings, write_whole
from dart_cli.weights.folder import folder_digest
from dart_cli.weights.manifest import read_manifest

if TYPE_CHECKING:
    from dart_cli.engines.base import Model
    from dart_cli.policy.verifier import Verifier

ANSWERS, REPORT, MISSES = "answers.jsonl", "report.json", "misses.html"

T = TypeVar("T")
_Weights = tuple[Path | None, int]
"""A published weight set and its version; (None, -1) for the model's weights."""


def run_grounding(options: GroundingOptions) -> Report | None:
    """Evaluate a model on a set. Return None for a dry run, which asks nothing and writes nothing.

    Raises UserError for a set with malformed rows, a model that cannot be loaded, or a folder with answers of
    other settings, and EngineError if no item was answered.
    """
    # 1. Read the set, and the settings of the model.
    grounding_set = read_set(options.folder, options.layout)
    _refuse_malformed(grounding_set, skip=options.skip_malformed)
    items = _spread(grounding_set.items, options.limit or 0)
    if not items:
        raise UserError(f"{options.folder} has no items to ask; is it the whole set?")
    config, answers = _configured(options, refusals=grounding_set.refusals > 0)
    if config.policy.pointing == "pointer":
        opening_of(answers)  # raises ConfigError for a format without a place for a pointer
        # One forward pass gives all candidates, so more of them cost nothing.
        options = replace(options, candidates=max(options.candidates, FIRST))
    _check_verifier(options)
    # The newest version of a live run changes, so it is looked up once.
    weights = (None, -1) if options.weights is None else chosen_weights(config, options.weights)
    settings = _settings(options, grounding_set, items, config, answers, weights)
    out = (
        options.out
        or Path("runs") / "grounding" / f"{grounding_set.layout.name}-{_name(options.model)}"
    )
    console = Console(markup=False, highlight=False)
    if options.dry_run:
        for name, value in {"out": str(out), **_labels(settings)}.items():
            console.print(f"{name + ':':<15} {value}")
        console.print("valid; nothing was asked")
        return None
    # 2. Ask for the answers that are missing.
    limit_threads(config.rollout.threads)
    end_with_parent()
    with AnswersFolder(out, settings, fresh=options.fresh) as folder:
        unanswered = _answer(options, config, answers, weights, items, folder)
        by_id = folder.of(item.id for item in items)
    if not by_id:
        [reason, *_] = unanswered.values()
        raise EngineError(f"no item was answered, and nothing is scored; the first: {reason}")
    # 3. Score them, write the report, and print it.
    report = score(items, by_id, candidates=options.candidates)
    result = {**settings.model_dump(), **summary(report)}
    if options.verifier:
        result["without_verifier"] = summary(_unverified(items, by_id, options.candidates))
    misses = [
        (item, by_id.get(item.id))
        for item in items
        if item.region is not None and not is_hit(item, by_id.get(item.id))
    ]
    title = f"{_name(options.model)} on {grounding_set.layout.title}"
    page = misses_page(
        title, _labels(settings), report, _spread(misses, options.misses), len(misses)
    )
    write_whole(out / MISSES, page.encode())
    write_whole(out / REPORT, json.dumps(result, indent=1).encode())
    if options.as_json:
        sys.stdout.write(f"{json.dumps(result)}\n")
        return report
    for table in report_tables(title, report):
        console.print(table)
    if options.verifier:
        console.print(_verified_line(items, by_id, options.candidates))
    for line in (*refusal_lines(report), *_notes(settings, report, misses, unanswered, out)):
        console.print(line)
    return report


def _check_verifier(options: GroundingOptions) -> None:
    """Raise UserError if --verifier names no verifier, or if there is only one candidate to choose from."""
    if not options.verifier:
        return
    if problem := model_problem(options.verifier):
        raise ConfigError(f"--verifier {problem}")
    from dart_cli.policy.verifier import VerifierSpec

    verifier_config(options.verifier, VerifierSpec.of(folder_of(options.verifier)), [])
    if options.candidates < 2:
        raise UserError("--verifier chooses among candidates; add --candidates 2 or more")


def _unverified(items: Sequence[Item], answers: dict[str, Answer], candidates: int) -> Report:
    """Return the scores of the same answers with the candidates in the model's order."""
    by_id = {name: answer.unverified() for name, answer in answers.items()}
    return score(items, by_id, candidates=candidates)


def _verified_line(items: Sequence[Item], answers: dict[str, Answer], candidates: int) -> str:
    """Return a line on what the verifier changed: the score without it, and its number of looks."""
    before = _unverified(items, answers, candidates).overall
    low, high = before.interval
    looks = [len(answer.verifier_scores) for answer in answers.values()]
    changed = sum(answer.picked > 0 for answer in answers.values())
    return (
        f"without the verifier: hit@1 {fraction(before.hit)} [{low:.2f}, {high:.2f}]; it looked at "
        f"{sum(looks) / max(1, len(looks)):.1f} candidates of an item and changed {changed} of {len(looks)} answers"
    )


def _refuse_malformed(grounding_set: GroundingSet, *, skip: bool) -> None:
    """Print malformed rows, and raise UserError for them unless `skip`."""
    malformed = grounding_set.malformed
    if not malformed:
        return
    for line in malformed:
        sys.stderr.write(f"malformed row: {line}\n")
    if not skip:
        raise UserError(
            f"{len(malformed)} of {len(malformed) + len(grounding_set.items)} rows are malformed, the first "
            f"is {malformed[0]}; correct the files, or leave such rows out with --skip-malformed"
        )


def _spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the items, evenly spread over all; all of them for 0."""
    if not most or len(items) <= most:
        return list(items)
    return [items[i * len(items) // most] for i in range(most)]


# --- what is stored ---------------------------------------------------------------------------


class Settings(WorkSettings):
    """Everything that the answers depend on, and that is reported with every figure."""

    what: ClassVar = "evaluation of grounding"
    verb: ClassVar = "dart eval grounding"
    option: ClassVar = "--out"
    may_differ: ClassVar = ("items", "malformed", "model", "verifier")
    """Fields on which no answer depends: a start with more items of a set continues one with fewer."""

    set: str
    set_digest: str  # of the annotation files and of the pictures
    items: int  # that are asked
    malformed: int  # rows that were left out
    model: str  # as the user named it; another path to the same files is the same model
    model_digest: str
    weights: str  # the published weight set in place of the model's; empty for the model's
    action_parser: str
    coordinates: str
    system_prompt: str
    template: str
    part_order: str
    min_pixels: int
    max_pixels: int
    resize_factor: int
    max_tokens: int
    candidates: int  # the greedy answer and those that are sampled
    temperature: float  # of the sampled ones
    seed: int
    engine: str
    dtype: str
    engine_options: str = ""  # of vLLM, e.g. quantisation
    pointing: str = "text"
    thinking: str = "off"
    verifier: str = ""  # as the user named it; empty for none
    verifier_digest: str = ""


class AnswersFolder(WorkFolder):
    """The folder with the answers so far. Only one process at a time may have it open."""

    def __init__(self, folder: Path, settings: Settings, *, fresh: bool = False) -> None:
        """Open or make a folder; with `fresh` an older one is moved aside.

        Raises UserError if it has other settings, is no such folder, or is in use.
        """
        super().__init__(folder, settings, fresh=fresh)
        try:
            self._lines = JsonLines(folder / ANSWERS, TypeAdapter(Answer), self.busy)
        except BaseException:
            super().close()
            raise
        self.answers = {answer.id: answer for answer in self._lines.pieces}

    def close(self) -> None:
        """Close the folder, so that another process may open it."""
        self._lines.close()
        super().close()

    def add(self, answer: Answer) -> None:
        """Store one more answer."""
        self.answers[answer.id] = answer
        self._lines.add(answer)

    def of(self, ids: Iterable[str]) -> dict[str, Answer]:
        """Return the answers to these items, by id, as far as they were answered."""
        return {name: self.answers[name] for name in ids if name in self.answers}


# --- the model and what its answers depend on ------------------------------------------------


def _configured(options: GroundingOptions, *, refusals: bool) -> tuple[Config, AnswerFormat]:
    """Return the configuration of the model, and the answer format. Raises ConfigError."""
    config, answers = grounding_config(
        options.model, options.action_parser, options.overrides or [], refusals=refusals
    )
    if config.rollout.engine not in MODEL_ENGINES:
        raise ConfigError(
            f"rollout.engine = {config.rollout.engine!r} has no model; use transformers or vllm"
        )
    if not options.max_pixels:
        return config, answers
    if config.rollout.engine == "vllm":
        raise ConfigError(
            "--max-pixels is not passed to vLLM; set it in the model's preprocessor_config.json"
        )
    least = screens_of(config).min_pixels
    if options.max_pixels < least:
        raise ConfigError(f"--max-pixels must be >= {least}, the model's fewest pixels")
    return config, answers


def _settings(
    options: GroundingOptions,
    grounding_set: GroundingSet,
    items: Sequence[Item],
    config: Config,
    answers: AnswerFormat,
    weights: _Weights,
) -> Settings:
    """Return everything that the answers depend on, from the set, the configuration and the weights."""
    policy, sizes = config.policy, screens_of(config)
    directory, version = weights
    published = ""
    if directory is not None:
        manifest = read_manifest(directory).model_dump_json().encode()
        published = f"v{version} {hashlib.blake2b(manifest, digest_size=16).hexdigest()}"
    return Settings(
        set=grounding_set.layout.name,
        set_digest=f"{grounding_set.digest}{pictures_digest(grounding_set.items)}",
        items=len(items),
        malformed=len(grounding_set.malformed),
        model=options.model,
        model_digest=folder_digest(folder_of(options.model), config.model.adapters),
        weights=published,
        action_parser=action_parser_identity(answers.name),
        coordinates=policy.coordinates,
        system_prompt=policy.system_prompt,
        template=policy.template,
        part_order=policy.part_order,
        min_pixels=sizes.min_pixels,
        max_pixels=options.max_pixels or sizes.max_pixels,
        resize_factor=sizes.factor,
        max_tokens=config.rollout.max_tokens,
        candidates=options.candidates,
        temperature=config.rollout.temperature if options.candidates > 1 else 0.0,
        seed=config.run.seed,
        engine=config.rollout.engine,
        engine_options=_engine_options(config),
        dtype=config.model.dtype,
        pointing=policy.pointing,
        thinking=policy.thinking,
        verifier=options.verifier,
        verifier_digest=folder_digest(folder_of(options.verifier)) if options.verifier else "",
    )


def _engine_options(config: Config) -> str:
    """Return the options of vLLM, which may e.g. quantise the model; empty without them."""
    options = config.vllm.options if config.rollout.engine == "vllm" else {}
    return json.dumps(options, sort_keys=True) if options else ""


def _labels(settings: Settings) -> dict[str, str]:
    """Return what is reported with every figure."""
    sampled = f", the others sampled at {settings.temperature:g}" if settings.candidates > 1 else ""
    how = f"greedy{sampled}; {settings.max_tokens} tokens at most"
    if settings.pointing == "pointer":
        how = f"{settings.candidates} candidates from one forward pass"
    verifier = {"verifier": settings.verifier} if settings.verifier else {}
    return {
        "set": settings.set,
        "model": f"{settings.model}{' ' + settings.weights if settings.weights else ''}",
        "items": f"{settings.items}"
        + (f", {settings.malformed} malformed rows left out" if settings.malformed else ""),
        "action_parser": settings.action_parser,
        "coordinates": settings.coordinates,
        "pointing": settings.pointing,
        **verifier,
        "max_pixels": str(settings.max_pixels),
        "min_pixels": str(settings.min_pixels),
        "system_prompt": settings.system_prompt or "none",
        "prompt": settings.template,
        "part_order": settings.part_order,
        "answers": how,
        "engine": f"{settings.engine}, {settings.dtype}",
    }


def _name(model: str) -> str:
    """Return the name of a model for a title and a folder."""
    return model.removeprefix("builtin:").rstrip("/").rpartition("/")[2] or "model"


# --- asking ----------------------------------------------------------------------------------


def _answer(
    options: GroundingOptions,
    config: Config,
    answers: AnswerFormat,
    weights: _Weights,
    items: Sequence[Item],
    folder: AnswersFolder,
) -> dict[str, str]:
    """Ask for the missing answers, and return why items have none, by id.

    Raises SystemExit if a signal stops it.
    """
    missing = [item for item in items if item.id not in folder.answers]
    if not missing:
        return {}
    waits, unanswered = OpenWaits(), dict[str, str]()
    with progress("grounding", len(items), "items") as advance:
        advance(len(items) - len(missing))

        async def ask() -> None:
            async with contextlib.AsyncExitStack() as stack:
                with waits.waiting("the model to load"):
                    model = await stack.enter_async_context(loaded_model(config, *weights))
                if options.max_pixels:
                    _bound_pixels(model, options.max_pixels)
                scorer = make_scorer(model, config, answers, options.candidates)
                if options.verifier:
                    from dart_cli.policy.verifier import THRESHOLD

                    verifier = await asyncio.to_thread(_verifier, options.verifier, config)
                    scorer = VerifiedScorer(scorer, verifier_scoring(verifier), THRESHOLD)

                def keep(answer: Answer) -> None:
                    folder.add(answer)
                    advance(1)

                at_once = config.rollout.max_batch
                unanswered.update(await answer_all(scorer, missing, at_once, keep, waits))

        def say_stopped() -> None:
            sys.stderr.write(
                f"{len(folder.answers)} of {len(items)} answers are in {folder.folder}; the same command continues\n"
            )

        if exit_code := run_until_stopped(ask(), waits, say_stopped):
            raise SystemExit(exit_code)
    return unanswered


def _verifier(folder: str, config: Config) -> Verifier:
    """Return the verifier in a folder, on the device and in the dtype of `config`. Raises ModelError."""
    from dart_cli.hardware.device import pick_device
    from dart_cli.policy.verifier import load_verifier

    return load_verifier(folder_of(folder), config.model.dtype, pick_device(config.rollout.device))


def _bound_pixels(model: Model, most: int) -> None:
    """Let the model resize screenshots to at most this many pixels."""
    from dart_cli.engines.responder import PolicyResponder

    assert isinstance(model.responder, PolicyResponder)
    images = model.responder.policy.images
    images.bounds = images.bounds[0], most


def _example(misses: Sequence[tuple[Item, Answer | None]]) -> str:
    """Return the first answer that has no point, and the reason."""
    answers = (answer for _, answer in misses if answer is not None)
    answer = next(answer for answer in answers if not any(answer.points[:1]))
    text = answer.texts[0] if answer.texts else ""
    return f"{answer.id}: {text[:60]!r}: {answer.problem[:160]}"


def _notes(
    settings: Settings,
    report: Report,
    misses: Sequence[tuple[Item, Answer | None]],
    unanswered: dict[str, str],
    out: Path,
) -> list[str]:
    """Return the lines below the tables: chance, items without a point, and the settings."""
    notes = [f"chance: {report.chance:.3f}, a click anywhere"]
    if settings.candidates < 3:
        notes.append("hit@3: n/a with a single answer; --candidates 3 samples two more")
    if report.overall.pointless:
        notes.append(f"no point in {report.overall.pointless} answers, e.g. {_example(misses)}")
    if unanswered:
        place, reason = next(iter(unanswered.items()))
        notes.append(f"no answer to {len(unanswered)} items, e.g. {place}: {reason}")
    labels = _labels(settings)
    notes.append(
        f"action parser {labels['action_parser']}, coordinates {labels['coordinates']}, "
        f"{labels['answers']}"
    )
    notes.append(
        f"max_pixels {labels['max_pixels']}, {labels['engine']}; prompt: {labels['prompt']!r}"
    )
    return [*notes, f"written to {out}: report.json, answers.jsonl, {MISSES}"]
