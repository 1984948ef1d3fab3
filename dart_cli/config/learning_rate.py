"""The learning rate of a configuration that sets none: it follows from the size of the model.

with_rate    fills in `train.lr` where the user did not set it
rate_for     the rate for a number of parameters, between the rates of a small and of a large model
rate_origin  where `train.lr` comes from, in words
"""

from __future__ import annotations

from math import log

from bus.errors import ModelError
from dart_cli.config.architecture import shape_of
from dart_cli.config.model_folder import model_folder, read_json
from dart_cli.config.schema import LEAST_RATE, Config

SMALL, LARGE = 0.63e6, 7e9
"""Numbers of parameters of the tiny model, and of the models for which rates are published. A pair of rates
has one rate for each of the two."""
RUN = (4e-4, LEAST_RATE)
"""Rates of a run: of the models that ship with dart (docs/log.md), and of DART's model (arXiv 2509.23866)."""


def with_rate(config: Config) -> Config:
    """Return `config` with the learning rate of its model. A rate that the user set is kept."""
    if config.train.lr is not None:
        return config
    count = _parameters(config)
    rate = LEAST_RATE if count is None else rate_for(count, RUN)
    train = config.train.model_copy(update={"lr": rate})
    object.__setattr__(train, "__pydantic_fields_set__", set(config.train.model_fields_set))
    return config.model_copy(update={"train": train})


def rate_for(parameters: float, rates: tuple[float, float], digits: int = 1) -> float:
    """Interpolate between `rates`, at SMALL and LARGE, on logarithmic scales, and round to `digits` digits.

    Smaller models than SMALL have the first rate, and larger ones than LARGE the second.
    """
    slope = log(rates[1] / rates[0]) / log(LARGE / SMALL)
    share = min(max(parameters, SMALL), LARGE) / SMALL
    return float(f"{rates[0] * share**slope:.{digits - 1}e}")


def rate_origin(config: Config) -> str:
    """Return e.g. `from the model: 0.6 million parameters`; empty where the user set the rate."""
    if "lr" in config.train.model_fields_set or config.train.lr is None:
        return ""
    count = _parameters(config)
    return (
        "the model's size is unknown" if count is None else f"from the model: {_size_text(count)}"
    )


def _parameters(config: Config) -> float | None:
    """Count the model's parameters from its config.json only. Return None if that cannot be read."""
    try:
        return shape_of(read_json(model_folder(config.model.path), "config.json")).parameters
    except (ModelError, KeyError):  # reported where the model is loaded
        return None


def _size_text(count: float) -> str:
    return (
        f"{count / 1e9:.1f} billion parameters"
        if count >= 1e9
        else f"{count / 1e6:.1f} million parameters"
    )
