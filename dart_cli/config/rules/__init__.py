"""Rules that concern several keys or the host, as rows: (key, condition, text).

policy    rules of [model], [policy], [env.judge] and the engines
learning  rules of [data], [train], [eval], [tune]
machine   rules of [run], [bus], [weights], [up]: places, sockets, GPUs
tasks     rules of [env] and of the lists of tasks
teacher   rules of [teacher]
check     all rules together: `check_config`, `find_mistakes`, `unread`

Every command refuses a configuration that breaks a rule, before it starts anything; `--dry-run` and `dart
doctor` report broken rules. A rule must be fast and must not import torch. This module has the types of the
rows:

Rule          one rule
Table         the rules of one subject, and the roles that they apply to
Reader        keys that are read only under a condition
Finding       an error or warning about a configuration or a host; `dart doctor` uses the same type
broken_rules  yields the broken rules of a table
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from dart_cli.config.schema import Config
from dart_cli.config.values import short_value

Condition = Callable[[Config], Any]


Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """A statement about a configuration or a host, and the fix. Only an error prevents a run."""

    subject: str  # the key of a configuration, or a part of the host; the sentence begins with it
    level: Level
    text: str
    cure: str = ""  # empty where nothing needs to be done

    def __str__(self) -> str:
        """Return the whole sentence."""
        return f"{self.subject} {self.text}{self.cure and f'; {self.cure}'}"


def broken_rule(key: str, sentence: str) -> Finding:
    """Return an error about a key. What follows the first "; " of the sentence is the fix."""
    text, _, fix = sentence.partition("; ")
    return Finding(key, "error", text, fix)


class Rule(NamedTuple):
    """One rule about a key.

    `broken` returns something true if the rule is broken. In `text`, {detail} stands for what it returned,
    {value} for the key's value, and {section.key} for the value of any other key.
    """

    key: str
    broken: Condition
    text: str
    ends: bool = False  # if it is broken, the rules below it in its table are not checked


class Reader(NamedTuple):
    """Keys that are read only if a condition holds, and the condition in words."""

    words: str
    holds: Condition
    keys: tuple[str, ...]


class Table(NamedTuple):
    """The rules of one subject."""

    rows: Sequence[Rule]
    roles: tuple[str, ...] = ()  # the roles to which the rules apply; empty for all
    when: Condition = bool  # the condition under which they apply; by default always


def broken_rules(table: Table, config: Config) -> Iterator[Finding]:
    """Yield every broken rule of one table."""
    sections = {name: getattr(config, name) for name in Config.model_fields}
    for key, broken, text, ends in table.rows:
        if detail := broken(config):
            value = short_value(value_of(config, key))
            yield broken_rule(key, text.format(detail=detail, value=value, **sections))
            if ends:
                return


def value_of(config: Config, key: str) -> Any:
    """Return the value of `section.key`; None within a section that is unset."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def twice(key: str) -> Rule:
    """Return the rule that a list has no element twice."""

    def repeated(config: Config) -> str:
        listed = value_of(config, key) or ()
        return ", ".join(
            repr(element) for element in sorted({*listed}) if listed.count(element) > 1
        )

    return Rule(key, repeated, "lists {detail} twice; remove one")
