"""Computes the physical bound on throughput: the smallest of the limits of environments, rollout and trainer.

    environments   every slot plays without a pause, and each completion takes as long as on an
                   idle replica: slots / (reset / steps + step + completion)
    rollout        every replica always decodes a full batch, all prefixes cached
    trainer        it trains without a pause: samples of a batch / duration of its update

No schedule can exceed any of them; `by` names the smallest.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.simulation.gpu import capacity
from benchmarks.simulation.profiles import expected
from benchmarks.simulation.times import Times
from dart_cli.config.schema import Config


@dataclass(frozen=True)
class Bound:
    """The bounds of actions per simulated minute."""

    environments: float
    rollout: float
    trainer: float

    @property
    def actions_per_minute(self) -> float:
        """The least of the three bounds."""
        return min(self.environments, self.rollout, self.trainer)

    @property
    def by(self) -> str:
        """The name of the least bound."""
        parts = {
            "environments": self.environments,
            "rollout": self.rollout,
            "trainer": self.trainer,
        }
        return min(parts, key=parts.__getitem__)


def bound_of(config: Config, *, slots: int, workers: int) -> Bound:
    """Return the bound of a run with `slots` environments in all and `workers` rollout workers."""
    times, data = Times.of(config), config.data
    profile = expected(str(config.env.options.get("profile", "osworld")))
    replica = capacity(times, config.rollout.max_batch, config.rollout.max_tokens)
    completion_s = replica.alone_s * times.speedup
    cycle_s = profile.reset_s / profile.steps + profile.step_s + completion_s
    samples = data.groups_per_batch * data.group_size * profile.steps
    update_s = times.train_s + times.train_sample_s * samples
    return Bound(
        environments=60.0 * slots / cycle_s,
        rollout=60.0 * workers * replica.requests_per_s / times.speedup,
        trainer=60.0 * samples / update_s,
    )
