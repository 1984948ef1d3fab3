"""What the policy itself played, whatever filled its groups: members of the pool and replays are not in it.

OwnPlay    counted as it happens: trajectories since the newest success, rewards, malformed completions
restored   the same, of what a store holds
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from bus.snapshot import OwnView
from dart_cli.algo.advantage import RewardKind, training_reward
from dart_cli.data.store.analytics import Analytics

REWARDS = 512
"""Trajectories in each of the two windows whose mean rewards are compared: the run's first, its newest."""
COMPLETIONS = 1000
"""Completions in each of the two windows whose shares of malformed ones are compared, likewise."""


class _Ends:
    """The first values of a series and the newest, as many of each."""

    def __init__(
        self, size: int, first: Iterable[float] = (), newest: Iterable[float] = ()
    ) -> None:
        self._size = size
        self._first = list(first)
        self._newest = deque(newest, maxlen=size)

    def add(self, value: float) -> None:
        if len(self._first) < self._size:
            self._first.append(value)
        self._newest.append(value)

    @property
    def means(self) -> tuple[float, float]:
        """Of the first and of the newest; 0 before there is a value."""
        return (
            sum(self._first) / max(1, len(self._first)),
            sum(self._newest) / max(1, len(self._newest)),
        )


class OwnPlay:
    """Counts of one run; `restored` goes on with those of an earlier start."""

    def __init__(self) -> None:
        self.rewards = _Ends(REWARDS)
        self.malformed = _Ends(COMPLETIONS)
        self.passed = self.completions = 0
        self.failed_since = 0  # trajectories since the newest success, or since the start
        self.updates_then = 0  # updates in the weights at that success; 0 before the first

    def completion(self, malformed: bool) -> None:
        """The policy answered a screen; `malformed` where its text was no action."""
        self.malformed.add(float(malformed))
        self.completions += 1

    def judged(self, passed: bool, reward: float, updates: int) -> None:
        """A trajectory was judged while there were so many updates in the weights."""
        self.rewards.add(reward)
        self.failed_since += 1
        if passed:
            self.passed += 1
            self.failed_since, self.updates_then = 0, updates

    def view(self, updates: int) -> OwnView:
        """As of so many updates."""
        reward_first, reward = self.rewards.means
        malformed_first, malformed = self.malformed.means
        return OwnView(
            passed=self.passed,
            failed_since=self.failed_since,
            updates_since=max(0, updates - self.updates_then),
            completions=self.completions,
            window=COMPLETIONS,
            malformed_first=malformed_first,
            malformed=malformed,
            reward_first=reward_first,
            reward=reward,
        )


def restored(store: Analytics, kind: RewardKind) -> OwnPlay:
    """What the policy played in the stored run; `kind` is data.reward."""
    own, counts = OwnPlay(), store.own_counts()
    own.passed, own.completions = counts.passed, counts.completions
    own.failed_since, own.updates_then = counts.failed_since, counts.updates_then
    own.malformed = _Ends(
        COMPLETIONS, store.own_malformed(COMPLETIONS), store.own_malformed(COMPLETIONS, newest=True)
    )
    first, newest = (
        [training_reward(outcome, reward, kind) or 0.0 for outcome, reward in verdicts]
        for verdicts in (store.own_verdicts(REWARDS), store.own_verdicts(REWARDS, newest=True))
    )
    own.rewards = _Ends(REWARDS, first, newest)
    return own
