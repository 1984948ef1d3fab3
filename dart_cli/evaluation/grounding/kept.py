"""What an evaluation of grounding keeps in its folder, so that a second start goes on.

Settings     all that the answers depend on; a start with others is refused
KeptAnswers  the answers so far, a line for each item

settings.json  answers.jsonl  report.json  misses.html
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from pydantic import TypeAdapter

from dart_cli.evaluation.grounding.items import Answer
from dart_cli.runtime.kept_folder import KeptFolder, KeptLines, KeptSettings

ANSWERS, REPORT, MISSES = "answers.jsonl", "report.json", "misses.html"


class Settings(KeptSettings):
    """All that answers depend on, and what is told with every figure."""

    what: ClassVar = "evaluation of grounding"
    verb: ClassVar = "dart eval grounding"
    option: ClassVar = "--out"
    told_alone: ClassVar = ("items", "malformed", "model", "verifier")
    """No answer depends on them: more items of a set go on from fewer."""

    set: str
    set_digest: str  # of the annotation files
    items: int  # asked, of them
    malformed: int  # rows left out
    model: str  # as it was named; another path to the same files is the same model
    model_digest: str
    weights: str  # the published weight set in its place; empty for the model as it comes
    codec: str
    coordinates: str
    system_prompt: str
    template: str
    part_order: str
    min_pixels: int
    max_pixels: int
    resize_factor: int
    max_tokens: int
    candidates: int  # the greedy answer and those that are sampled
    temperature: float  # of these
    seed: int
    engine: str
    dtype: str
    pointing: str = "text"
    verifier: str = ""  # as it was named; empty for none
    verifier_digest: str = ""
    verifier_threshold: float = 0.0


class KeptAnswers(KeptFolder):
    """The answers in a folder. One process at a time may have it open."""

    def __init__(self, folder: Path, settings: Settings, *, fresh: bool = False) -> None:
        """Open or begin a folder; with `fresh` an older one is set aside.

        Raises UserError where it is of other settings, is no such folder, or is in use.
        """
        super().__init__(folder, settings, fresh=fresh)
        try:
            self._lines = KeptLines(folder / ANSWERS, TypeAdapter(Answer))
        except BaseException:
            super().close()
            raise
        self.answers = {answer.id: answer for answer in self._lines.pieces}

    def close(self) -> None:
        """Free the folder."""
        self._lines.close()
        super().close()

    def add(self, answer: Answer) -> None:
        """Keep one more answer."""
        self.answers[answer.id] = answer
        self._lines.add(answer)

    def of(self, ids: Iterable[str]) -> dict[str, Answer]:
        """The answers to these items, as far as there are some."""
        return {each: self.answers[each] for each in ids if each in self.answers}
