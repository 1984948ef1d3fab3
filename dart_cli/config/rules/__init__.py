"""What no single key of a configuration can show, as rows: (key, condition, text).

policy    rows of [model], [policy], [env.judge] and the engines
learning  rows of [data], [train], [eval], [tune]
machine   rows of [run], [bus], [weights], [up]: places, sockets, GPUs
tasks     rows of [env] and of the lists of tasks
check     all of them: `check_config`, `find_mistakes`, `unread`

`dart COMMAND` refuses by them, `--dry-run` and `dart doctor` tell them, docs/config.md has what reads a key.
A row is asked for without torch and fast, so that every verb refuses before it starts anything. Here is how one
is written:

Rule      such a row
Table     rows of one subject, and who asks them
Reader    keys that act only under a condition
Finding   what is found of a configuration or a host: `dart doctor` has the same
found_in  the findings of a table
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from dart_cli.config.schema import Config
from dart_cli.config.values import shown

Condition = Callable[[Config], Any]


Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What was found, and what to do about it. A run cannot work with an error; with a warning it can."""

    subject: str  # of a configuration its key, with which the sentence begins
    level: Level
    text: str
    cure: str = ""  # empty where nothing needs to be done

    def __str__(self) -> str:
        """Return the whole sentence."""
        return f"{self.subject} {self.text}{self.cure and f'; {self.cure}'}"


def broken_rule(key: str, sentence: str) -> Finding:
    """Return an error of a key; what follows the first "; " of the sentence is the cure."""
    text, _, cure = sentence.partition("; ")
    return Finding(key, "error", text, cure)


class Rule(NamedTuple):
    """One row.

    `broken` gives what is wrong, or anything false. `text` may name it as {found}, the key's value as
    {value}, and any other as {section.key}.
    """

    key: str
    broken: Condition
    text: str
    ends: bool = False  # where it is broken, the rows below it in its table mean nothing


class Reader(NamedTuple):
    """Keys that nothing reads unless a condition holds, and the condition in words."""

    words: str
    holds: Condition
    keys: tuple[str, ...]


class Table(NamedTuple):
    """Rows of one subject."""

    rows: Sequence[Rule]
    roles: tuple[str, ...] = ()  # for which they are asked; empty for all
    when: Condition = bool  # under which; a configuration is true


def found_in(table: Table, config: Config) -> Iterator[Finding]:
    """Every broken rule of one table."""
    sections = {name: getattr(config, name) for name in Config.model_fields}
    for key, broken, text, ends in table.rows:
        if found := broken(config):
            value = shown(value_of(config, key))
            yield broken_rule(key, text.format(found=found, value=value, **sections))
            if ends:
                return


def value_of(config: Config, key: str) -> Any:
    """Return the value of `section.key`; None within a section that is unset."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def twice(key: str) -> Rule:
    """No list has an element twice."""

    def repeated(config: Config) -> str:
        listed = value_of(config, key) or ()
        return ", ".join(repr(each) for each in sorted({*listed}) if listed.count(each) > 1)

    return Rule(key, repeated, "lists {found} twice; remove one")
