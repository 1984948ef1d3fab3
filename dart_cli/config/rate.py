"""The learning rate of a configuration that sets none: it follows the size of the model.

with_rate    the configuration with it
rate_of      the rate of so many parameters
rate_origin  where `train.lr` comes from, in words; empty where the user set it
"""

from __future__ import annotations

from math import log10, prod

from bus.errors import ModelError
from dart_cli.config.architecture import expected_tensors
from dart_cli.config.family_values import folder_of
from dart_cli.config.model_files import read_json
from dart_cli.config.schema import LEAST_RATE, Config

MOST_RATE = 4e-4
"""Of the models that ship with dart, and of those as small (docs/log.md)."""
SMALL, LARGE = 0.6e6, 7e9
"""Parameters up to which the rate is `MOST_RATE`, and from which on it is `LEAST_RATE`."""
_SLOPE = log10(MOST_RATE / LEAST_RATE) / log10(LARGE / SMALL)


def with_rate(config: Config) -> Config:
    """`config` with the learning rate of its model, where it sets none; a set one stays as it is."""
    if config.train.lr is not None:
        return config
    count = _parameters(config)
    rate = LEAST_RATE if count is None else rate_of(count)
    train = config.train.model_copy(update={"lr": rate})
    object.__setattr__(train, "__pydantic_fields_set__", set(config.train.model_fields_set))
    return config.model_copy(update={"train": train})


def rate_of(parameters: float) -> float:
    """A power of the size between the two ends, to one digit."""
    share = min(max(parameters, SMALL), LARGE) / SMALL
    return float(f"{MOST_RATE * share**-_SLOPE:.0e}")


def rate_origin(config: Config) -> str:
    """E.g. `from the model: 0.6 million parameters`."""
    if "lr" in config.train.model_fields_set or config.train.lr is None:
        return ""
    count = _parameters(config)
    return "the model's size is unknown" if count is None else f"from the model: {_told(count)}"


def _parameters(config: Config) -> float | None:
    """By its config.json alone; None where there is none that can be read."""
    folder = folder_of(config)
    if folder is None:
        return SMALL
    try:
        return sum(map(prod, expected_tensors(read_json(folder, "config.json")).values()))
    except (ModelError, KeyError):  # what loads the model refuses it
        return None


def _told(count: float) -> str:
    return (
        f"{count / 1e9:.1f} billion parameters"
        if count >= 1e9
        else f"{count / 1e6:.1f} million parameters"
    )
