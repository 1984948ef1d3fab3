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
Finding   a broken rule: the key, and the sentence that begins with it
found_in  the findings of a table
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from dart_cli.config.schema import Config
from dart_cli.config.values import shown

Condition = Callable[[Config], Any]


class Finding(NamedTuple):
    """`key` and the rest of a sentence that begins with it; what follows its first "; " is the cure."""

    key: str
    text: str


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
    """Every broken rule of one table, whoever asks."""
    sections = {name: getattr(config, name) for name in Config.model_fields}
    for key, broken, text, ends in table.rows:
        if found := broken(config):
            value = shown(value_of(config, key))
            yield Finding(key, text.format(found=found, value=value, **sections))
            if ends:
                return


def value_of(config: Config, key: str) -> Any:
    """The value of `section.key`; None within a section that is unset."""
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
