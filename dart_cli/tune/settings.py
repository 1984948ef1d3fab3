"""The settings of a training, and the folder of its state while it is unfinished: OUT.part, beside OUT.

TuneSettings         everything that the weights depend on; a second start with other settings is refused
part_of              the folder with the state from which a second start continues
settings_of_config   the settings that follow from the configuration alone
refuse_changed       raises the error for changed settings, before torch is loaded and the data is read
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError

from bus.errors import UserError
from dart_cli.config.schema import Config
from dart_cli.runtime.work_folder import SETTINGS, WorkSettings, refuse_foreign, refuse_other


class TuneSettings(WorkSettings):
    """Everything that the trained weights depend on."""

    what: ClassVar = "training"
    verb: ClassVar = "dart tune"
    option: ClassVar = "tune.out"

    learned: str  # the kind of answers: AnswerKind
    data_digest: str  # of everything that is learned, pictures included
    examples: int
    held_out: tuple[int, ...]  # rows that are not learned
    model_digest: str
    action_parser: str
    prompt: str  # system prompt, template, order of the parts
    coordinates: str
    max_pixels: int
    head_share: float
    epochs: float
    max_minutes: float
    batch: int
    micro_batch: int
    pack_tokens: int
    lr: float
    lr_head: float
    target: str
    weight_decay: float
    grad_clip: float
    freeze_vision: bool
    lora: str  # settings of the adapters; empty for none
    recompute: bool
    dtype: str
    device: str
    seed: int


def part_of(out: Path) -> Path:
    """Return the folder with the state from which a second start continues."""
    return out.with_name(f"{out.name}.part")


def settings_of_config(config: Config, learned: str) -> dict[str, Any]:
    """Return the settings that follow from the configuration alone; `learned` is the kind of answers."""
    train, tune, lora = config.train, config.tune, config.model.lora
    is_prompted = learned != "completions"
    return {
        "head_share": tune.head_share if learned == "pointer" else 0.0,
        "max_minutes": tune.max_minutes,
        "micro_batch": tune.micro_batch if is_prompted else 0,
        "pack_tokens": 0 if is_prompted else train.pack_tokens,
        "target": tune.target,
        "weight_decay": train.weight_decay,
        "grad_clip": train.grad_clip,
        "freeze_vision": config.model.freeze_vision,
        "lora": "" if lora is None else lora.model_dump_json(),
        "recompute": train.recompute == "layer",
        "dtype": config.model.dtype,
        "seed": config.run.seed,
    }


def refuse_changed(config: Config) -> None:
    """Raise UserError if OUT.part is no training, or was begun with other settings.

    Settings that follow from the rows and the model are compared later, when these have been read.
    """
    assert config.tune.out is not None
    part = part_of(config.tune.out)
    try:
        stored = TuneSettings.model_validate_json((part / SETTINGS).read_bytes())
    except OSError:
        refuse_foreign(part, TuneSettings)
        return
    except ValidationError:
        raise UserError(
            f"{part} was begun by another version of dart; choose another tune.out, or begin anew with --fresh"
        ) from None
    optional = {key: getattr(config.tune, key) for key in ("epochs", "batch", "lr")}
    changes = settings_of_config(config, stored.learned)
    changes |= {key: value for key, value in optional.items() if value is not None}
    refuse_other(part, stored.model_copy(update=changes))
