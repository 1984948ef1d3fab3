"""What a configuration asks of the trainer: its weight channel and its learner.

make_channel   the weight channel
make_learner   the learner of one process, its model loaded
identity_of    what tells its model folder from another one
"""

from __future__ import annotations

from dart_cli.config.devices import made_by_own
from dart_cli.config.endpoints import own_address, weights_dir
from dart_cli.config.schema import Config
from dart_cli.train.base import Learner
from dart_cli.train.checkpoints.identity import model_identity
from dart_cli.weights.broadcast.channel import BroadcastChannel
from dart_cli.weights.broadcast.group import Transport
from dart_cli.weights.file import FileChannel


def make_channel(config: Config) -> FileChannel:
    """The weight channel that a configuration asks for. Raises RunDirectoryError, ConfigError."""
    weights = config.weights
    directory, shared = weights_dir(config).absolute(), weights.directory is None
    lora = config.model.lora
    if weights.channel == "file":
        return FileChannel(directory, weights.keep, shared=shared, lora=lora)
    transport = Transport(weights.channel, own_address(config), config.train.device)
    return BroadcastChannel(directory, transport, weights.keep, shared=shared, lora=lora)


def identity_of(config: Config) -> str:
    """What tells the model folder from another one; empty without a model. Raises ModelError."""
    if config.train.learner != "torch":
        return ""
    from dart_cli.config.model_folder import resolve

    return model_identity(resolve(config.model.path))


def make_learner(config: Config) -> Learner:
    """The learner that a configuration asks for, its model loaded. Raises ModelError, ConfigError."""
    if config.train.learner != "torch":
        return made_by_own("train.learner", config.train.learner, config, Learner)  # type: ignore[type-abstract]
    from dart_cli.train.learner import PolicyLearner
    from dart_cli.train.model import TrainModel

    return PolicyLearner(TrainModel.load(config), config.train)
