"""What a teacher has cost and which episodes it has played, over all starts of a collection.

TeacherRecord       the record: counts, budget, seeds that need not be played again; a file of JSON lines
BudgetSpentError    the error for a request that the budget does not allow
teacher_id          returns the name of a teacher with a digest of how it plays

Each answer and each episode is a line, written at once, so that a killed process loses no more than the
answers that were under way.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from bus.errors import NoAnswerError, UserError
from bus.messages import Outcome
from dart_cli.config.schema import Config, TeacherConfig
from dart_cli.runtime.work_folder import JsonLines, StoredModel

FILE = "teacher-record.jsonl"
_SAME = {"url", "key_env", "concurrent", "answer_s", "budget_requests", "budget_tokens"}
_SAME |= {"price_prompt", "price_answer"}
"""Keys of [teacher] with which a teacher plays the same."""


class BudgetSpentError(NoAnswerError):
    """The budget of the teacher allows no more requests."""


class Entry(StoredModel):
    """A line of the record: a request, or an episode that is over."""

    teacher: str
    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    task: str = ""  # of an episode
    seed: int = 0
    outcome: Outcome | None = None
    unusable: str = (
        ""  # why its answer was no step of the policy; empty for an episode with a verdict
    )


@dataclass
class Costs:
    """Requests and tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.prompt_tokens + self.answer_tokens

    def add(self, entry: Entry) -> None:
        """Add what a line of the record has cost."""
        self.requests += entry.requests
        self.prompt_tokens += entry.prompt_tokens
        self.answer_tokens += entry.answer_tokens

    def money(self, teacher: TeacherConfig) -> float:
        """Return the price, in the user's currency; 0 without prices."""
        prompts = self.prompt_tokens * teacher.price_prompt
        return (prompts + self.answer_tokens * teacher.price_answer) / 1e6


@dataclass
class TeacherRecord:
    """The record of one collection. Close it at the end."""

    path: Path
    id: str
    teacher: TeacherConfig
    now: Costs = field(default_factory=Costs)  # of this start
    total: Costs = field(default_factory=Costs)  # of all starts
    episodes: Counter[str] = field(default_factory=Counter)  # outcome -> episodes of this start
    unusable: Counter[str] = field(default_factory=Counter)  # reason -> episodes of this start
    _reasons: dict[str, tuple[str, bool]] = field(default_factory=dict)  # of episodes in play

    def __post_init__(self) -> None:
        """Open the file. Raises UserError if it cannot be read, or another process has it."""
        busy = f"{self.path} is in use by another `dart data collect`; wait for it"
        self._lines = JsonLines(self.path, TypeAdapter(Entry), busy)
        for entry in self._lines.pieces:
            self.total.add(entry)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def settled_seeds(self, task_id: str) -> set[int]:
        """Return the seeds of a task that this teacher has played to a verdict, or answered unusably."""
        return {
            entry.seed
            for entry in self._lines.pieces
            if (entry.teacher, entry.task) == (self.id, task_id)
            and (entry.unusable or entry.outcome in ("pass", "fail"))
        }

    @property
    def is_spent(self) -> bool:
        """Whether the budget allows no more requests."""
        teacher, total = self.teacher, self.total
        return 0 < teacher.budget_requests <= total.requests or (
            0 < teacher.budget_tokens <= total.tokens
        )

    @property
    def budget(self) -> str:
        """The budget that is spent, as a sentence."""
        teacher, total = self.teacher, self.total
        if 0 < teacher.budget_requests <= total.requests:
            key, spent = "budget_requests", total.requests
        else:
            key, spent = "budget_tokens", total.tokens
        return (
            f"teacher.{key} = {getattr(teacher, key)} is spent ({spent} in all starts, {self.path}); raise it "
            "and start again to go on"
        )

    def begin_request(self) -> None:
        """Count a request. Raises BudgetSpentError if the budget does not allow it."""
        if self.is_spent:
            raise BudgetSpentError(self.budget, is_worth_repeating=False)
        self._add(Entry(teacher=self.id, requests=1))

    def end_request(
        self, prompt_tokens: int, answer_tokens: int, *, is_refusal: bool = False
    ) -> None:
        """Count the tokens of an answer.

        Raises UserError if the server does not count them, but for refusals, and there is a budget of tokens.
        """
        if self.teacher.budget_tokens and not (prompt_tokens + answer_tokens or is_refusal):
            raise UserError(
                f"teacher.budget_tokens cannot be kept: {self.teacher.url} does not count tokens in its "
                "answers; set teacher.budget_requests instead"
            )
        tokens = {"prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens}
        self._add(Entry(teacher=self.id, **tokens))

    def note(self, episode: str, reason: str, *, lasts: bool) -> None:
        """Note why an answer in an episode is no step of the policy. A reason that `lasts` comes again."""
        self._reasons[episode] = reason, lasts

    def end_episode(self, name: str, task_id: str, seed: int, outcome: Outcome) -> None:
        """Count an episode that is over."""
        reason, lasts = self._reasons.pop(name, ("", False))
        self.episodes[outcome] += 1
        self.unusable.update([reason] if reason else [])
        unusable = reason if lasts else ""
        self._lines.add(
            Entry(teacher=self.id, task=task_id, seed=seed, outcome=outcome, unusable=unusable)
        )

    def _add(self, entry: Entry) -> None:
        self.now.add(entry)
        self.total.add(entry)
        self._lines.add(entry)

    def summary(self) -> dict[str, object]:
        """Return the counts as plain values, for `--json`."""
        return {
            "name": self.teacher.title,
            "episodes": dict(self.episodes),
            "unusable": dict(self.unusable),
            "requests": self.now.requests,
            "prompt_tokens": self.now.prompt_tokens,
            "answer_tokens": self.now.answer_tokens,
            "cost": self.now.money(self.teacher),
            "all_starts": vars(self.total) | {"cost": self.total.money(self.teacher)},
            "budget_spent": self.is_spent,
        }

    def lines(self) -> list[str]:
        """Return the counts as lines of text."""
        lines = [f"teacher {self.teacher.title}: {self._costs(self.now)}"]
        if self.total.requests > self.now.requests:
            lines.append(f"over all starts: {self._costs(self.total)}")
        if self.unusable:
            reasons = ", ".join(f"{count} {why}" for why, count in self.unusable.most_common())
            lines.append(f"unusable episodes: {reasons}")
        return lines

    def _costs(self, costs: Costs) -> str:
        money = costs.money(self.teacher)
        return (
            f"{costs.requests:,} requests, {costs.prompt_tokens:,} tokens of prompts, "
            f"{costs.answer_tokens:,} of answers" + (f", cost {money:,.2f}" if money else "")
        )


def teacher_id(config: Config, digest_of_folder: Callable[[str], str], *, hints: bool) -> str:
    """Return the teacher's name and a digest of how it plays and what the policy learns of it.

    `digest_of_folder` returns a digest of a model folder's contents.
    """
    teacher = config.teacher
    parts = [
        teacher.model_dump(mode="json", exclude=_SAME),
        config.policy.model_dump(mode="json"),
        config.rollout.max_tokens,
        config.env.model_dump(mode="json", include={"suite", "options", "observe"}),
        hints,
        "" if teacher.url else digest_of_folder(teacher.model),
    ]
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=3).hexdigest()
    return f"{teacher.name if teacher.url else Path(teacher.model).name}#{digest}"
