"""The learning rate of a configuration that sets none: it follows the size of the model.

with_rate    the configuration with it
rate_for     the rate of so many parameters, between that of a small and that of a large model
rate_origin  where `train.lr` comes from, in words; empty where the user set it
"""

from __future__ import annotations

from math import log

from bus.errors import ModelError
from dart_cli.config.architecture import shape_of
from dart_cli.config.model_folder import model_folder, read_json
from dart_cli.config.schema import LEAST_RATE, Config

SMALL, LARGE = 0.63e6, 7e9
"""Parameters of the tiny model, and of those that rates are published for: the ends of each pair of rates."""
RUN = (4e-4, LEAST_RATE)
"""Of a run: of the models that ship with dart (docs/log.md), and of DART's (arXiv 2509.23866)."""


def with_rate(config: Config) -> Config:
    """`config` with the learning rate of its model, where it sets none; a set one stays as it is."""
    if config.train.lr is not None:
        return config
    count = _parameters(config)
    rate = LEAST_RATE if count is None else rate_for(count, RUN)
    train = config.train.model_copy(update={"lr": rate})
    object.__setattr__(train, "__pydantic_fields_set__", set(config.train.model_fields_set))
    return config.model_copy(update={"train": train})


def rate_for(parameters: float, rates: tuple[float, float], digits: int = 1) -> float:
    """Return the line through `rates` at SMALL and LARGE in logarithms, and no rate beyond them."""
    slope = log(rates[1] / rates[0]) / log(LARGE / SMALL)
    share = min(max(parameters, SMALL), LARGE) / SMALL
    return float(f"{rates[0] * share**slope:.{digits - 1}e}")


def rate_origin(config: Config) -> str:
    """E.g. `from the model: 0.6 million parameters`."""
    if "lr" in config.train.model_fields_set or config.train.lr is None:
        return ""
    count = _parameters(config)
    return "the model's size is unknown" if count is None else f"from the model: {_told(count)}"


def _parameters(config: Config) -> float | None:
    """By its config.json alone; None where there is none that can be read."""
    try:
        return shape_of(read_json(model_folder(config.model.path), "config.json")).parameters
    except (ModelError, KeyError):  # what loads the model refuses it
        return None


def _told(count: float) -> str:
    return (
        f"{count / 1e9:.1f} billion parameters"
        if count >= 1e9
        else f"{count / 1e6:.1f} million parameters"
    )
