"""Distributions of a GUI's durations: named profiles, their draws, and their exact means.

    PROFILES     name -> Profile: `osworld`, `browser`, `instant`
    Profile      draws of one reset, one step, one episode's length
    expected     the means of a profile, in closed form, for a benchmark's physical bound

All times are seconds before any speedup; the means leave injected faults out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from bus.errors import TaskError


@dataclass(frozen=True)
class LogNormal:
    """A distribution of positive numbers: `median`, and `sigma`, the standard deviation of their logarithm."""

    median: float
    sigma: float

    @property
    def mean(self) -> float:
        """The exact mean: median * exp(sigma^2 / 2)."""
        return self.median * math.exp(self.sigma**2 / 2)

    def draw(self, rng: Random) -> float:
        """Return one random number; 0 if the median is 0."""
        return self.median * math.exp(rng.gauss(0.0, self.sigma))

    def above(self, bound: float) -> float:
        """Return the probability of a number above `bound` > 0."""
        if self.median == 0:
            return 0.0
        if self.sigma == 0:
            return float(self.median > bound)
        return 0.5 * math.erfc(math.log(bound / self.median) / (self.sigma * math.sqrt(2)))


@dataclass(frozen=True)
class Expected:
    """The means of a profile."""

    steps: float  # of an episode
    step_s: float  # seconds the environment acts
    reset_s: float  # seconds

    @property
    def episode_s(self) -> float:
        """The seconds of an episode with a policy that answers at once."""
        return self.reset_s + self.steps * self.step_s


@dataclass(frozen=True)
class Profile:
    """The durations of one kind of GUI."""

    reset: LogNormal  # seconds
    step: LogNormal  # seconds, from the action to the next screenshot
    stall_share: float  # of steps that stall: a page that loads, a dialog that hangs
    stall_s: float  # seconds that a stall adds
    length: LogNormal  # steps of an episode, before rounding and the cap
    cap: int  # steps after which every episode has ended

    def draw_reset_s(self, rng: Random) -> float:
        """Return the seconds of one reset."""
        return self.reset.draw(rng)

    def draw_step_s(self, rng: Random) -> float:
        """Return the seconds of one step."""
        stall_s = self.stall_s if rng.random() < self.stall_share else 0.0
        return self.step.draw(rng) + stall_s

    def draw_steps(self, rng: Random) -> int:
        """Draw the number of steps of one episode: 1 to `cap`."""
        return min(self.cap, max(1, round(self.length.draw(rng))))

    def mean_episode(self) -> Expected:
        """Return the means of the three draws, in closed form."""
        # E[L] = sum over k of P(L >= k); a length of k or more is one that rounds up to k.
        steps = 1.0 + sum(self.length.above(k - 0.5) for k in range(2, self.cap + 1))
        step_s = self.step.mean + self.stall_share * self.stall_s
        return Expected(steps, step_s, self.reset.mean)


PROFILES: dict[str, Profile] = {
    # A desktop in a virtual machine. OSWorld pauses 2 s after each action, then takes the
    # screenshot over HTTP; DART's release does the same and sleeps 60 s at the boot of every
    # episode. Here a snapshot is reverted instead: 20 s. An action with its settling: 4 s, of
    # which one in a hundred waits 20 s longer for a page or an application. Successful OSWorld
    # episodes take some ten steps; 30 is the cap that DART trains with.
    "osworld": Profile(
        reset=LogNormal(20.0, 0.35),
        step=LogNormal(4.0, 0.5),
        stall_share=0.01,
        stall_s=20.0,
        length=LogNormal(10.0, 0.7),
        cap=30,
    ),
    # A page in a browser that stays open: a reset loads the page anew, an action waits for
    # the network to be quiet.
    "browser": Profile(
        reset=LogNormal(2.0, 0.3),
        step=LogNormal(0.8, 0.4),
        stall_share=0.01,
        stall_s=5.0,
        length=LogNormal(6.0, 0.5),
        cap=15,
    ),
    # Nothing takes time: a benchmark then measures everything around the environment.
    "instant": Profile(
        reset=LogNormal(0.0, 0.0),
        step=LogNormal(0.0, 0.0),
        stall_share=0.0,
        stall_s=0.0,
        length=LogNormal(6.0, 0.5),
        cap=15,
    ),
}
"""The kinds of GUI; medians and spreads as written, means from `expected`."""


def profile_named(name: str) -> Profile:
    """Return the profile called `name`. Raises TaskError."""
    if name not in PROFILES:
        raise TaskError(f"profile must be one of {', '.join(PROFILES)}, got {name!r}")
    return PROFILES[name]


def expected(profile: str | Profile) -> Expected:
    """Return mean steps, seconds a step and seconds a reset of a profile or its name. Raises TaskError."""
    times = profile_named(profile) if isinstance(profile, str) else profile
    return times.mean_episode()
