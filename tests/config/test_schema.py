"""Every field refuses a wrong type, a value out of bounds and a misspelt name, and has a text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from bus.errors import ConfigError
from dart_cli.cli.main import main
from dart_cli.config.load import load_config
from dart_cli.config.schema import inner_section, section_types
from dart_cli.config.values import to_toml
from tests.config.mistakes import Case, assert_one_line, write


def _field_cases() -> Iterator[Case]:
    """For every field: a value of a wrong type, each bound overstepped, its name misspelt."""
    for section, kind in section_types().items():
        for name, field in kind.model_fields.items():
            key = f"{section}.{name}"
            for what, value, cure in _wrong_values(field):
                toml = f"[{section}]\n{name} = {value}\n"
                yield Case(f"{key} {what}", toml, key, cure)
            typo = name[:-2] + name[-1] if len(name) > 3 else name + name[-1]
            good = to_toml(field.default) or '"x"'
            yield Case(
                f"{key} misspelt", f"[{section}]\n{typo} = {good}\n", f"{section}.{typo}", name
            )


def _wrong_values(field: FieldInfo) -> Iterator[tuple[str, str, str]]:
    """(what, TOML value, cure) for one field."""
    default = field.default
    if default is None:  # unset, or a number
        default = {int: 1, float: 0.5}.get(get_args(field.annotation)[0])
    if get_origin(field.annotation) is Literal:
        yield "of no such choice", '"nonsense"', f"must be {get_args(field.annotation)[0]!r}"
        yield "not text", "[7]", "must be '"
    elif isinstance(default, bool):
        yield "not a bool", "1", "must be true or false"
        yield "a word", '"yes"', "must be true or false"
    elif isinstance(default, int):
        yield "not whole", "1.5", "must be a whole number"
        yield "text", '"many"', "must be a whole number"
    elif isinstance(default, float):
        yield "text", '"fast"', "must be a number"
        yield "not finite", "inf", "must be"
    elif isinstance(default, str):
        yield "not text", "3", "must be text in quotes"
    elif inner_section(field.annotation):
        yield "not a section", "3", "] above its keys"
    elif isinstance(default, Path) or default is None:
        yield "not a path", "3", "must be a path in quotes"
    elif isinstance(default, list):
        yield "not a list", '"mini/popup"', "must be a list"
        [member] = get_args(field.annotation)
        if get_args(member)[:1] == (int,):
            yield "of wrong members", '["first"]', "must be a whole number"
        elif get_origin(next(iter(get_args(member)), None)) is tuple:
            yield "of wrong members", "[3]", "must be a list in brackets"
            yield "of short members", "[[0.0, 0.5, 1.0]]", "has too few numbers"
        else:
            is_choice = get_origin(member) is Literal
            yield "of wrong members", "[3]", "must be '" if is_choice else "in quotes"
    elif isinstance(default, dict):
        yield "not a table", "3", "must be a table"
    elif isinstance(default, tuple):
        yield "too short", f"[{default[0]}]", "has too few numbers"
        if isinstance(default[0], float):
            yield "out of range", "[0.9, 1.5]", "must be < 1"
    for name, sign, step in (("ge", ">=", -1), ("gt", ">", 0), ("le", "<=", 1), ("lt", "<", 0)):
        for constraint in field.metadata:
            bound = getattr(constraint, name, None)
            if bound is not None and isinstance(default, int | float):
                yield (
                    f"beyond {bound}",
                    repr(type(default)(bound + step)),
                    f"must be {sign} {bound if isinstance(bound, int) else format(bound, 'g')}",
                )


CASES = [*_field_cases()]


def test_there_are_two_hundred_mistakes() -> None:
    assert len({case.toml for case in CASES}) >= 200


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_wrong_field_is_one_line_with_file_key_and_cure(
    case: Case, tmp_path: Path, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert_one_line(case, write(case, tmp_path, places), capsys)


UNBOUNDED = {
    *("train.clip_high", "train.grad_clip", "train.kl_beta"),
}
"""Numbers of a formula, where any size has a meaning: inf, as it were, switches a part off."""


def test_every_number_that_sizes_something_has_an_upper_bound() -> None:
    for section, kind in section_types().items():
        for name, field in kind.model_fields.items():
            number = isinstance(field.default, int | float) and not isinstance(field.default, bool)
            bounded = any(hasattr(each, "le") or hasattr(each, "lt") for each in field.metadata)
            assert not number or bounded or f"{section}.{name}" in UNBOUNDED, f"{section}.{name}"


SLIPS = [
    *("env.slots = 1000000000000", "rollout.threads = 10000", "train.threads = 100000000000"),
    *("rollout.max_tokens = 100000000", "data.max_gb = 0.0"),
    *('run.dir = "/proc/x"', 'run.dir = "/dev/null/x"', 'run.dir = "a\\nb"'),
    'weights.directory = "/proc/w"',
]


@pytest.mark.parametrize("line", SLIPS)
def test_a_slip_of_the_keyboard_is_refused_by_its_key(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, _, value = line.partition(" = ")
    section, _, name = key.partition(".")
    path = tmp_path / "c.toml"
    path.write_text(f"[{section}]\n{name} = {value}\n")
    with pytest.raises(SystemExit) as exit_:
        main(["up", str(path), "--dry-run"])
    out, err = capsys.readouterr()
    assert (exit_.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {key}")


def test_every_field_has_a_text_that_ends_as_a_sentence() -> None:
    for section, kind in section_types().items():
        assert kind.__doc__, section
        for name, field in kind.model_fields.items():
            assert field.description, f"{section}.{name}"
            assert field.description.rstrip().endswith("."), f"{section}.{name}"


@pytest.mark.parametrize(
    "key", ["run.dir", "weights.directory", "bus.keys", "model.path", "data.pool"]
)
def test_a_path_with_a_null_byte_is_refused_with_its_key(key: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    section, _, name = key.partition(".")
    value = r'"a\u0000b"'
    path.write_text(f"[{section}]\n{name} = {f'[{value}]' if name == 'pool' else value}\n")
    with pytest.raises(
        ConfigError, match=rf"^{key}.* has a null byte, as no path has; choose another"
    ):
        load_config(path)
