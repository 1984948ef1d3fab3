"""A GPU replica in simulated time: continuous batching, exact to the token, without sleeping.

    Costs             seconds of each kind of work
    SimulatedRequest  one completion: when it arrived, started and ended, which weights drew its tokens
    Replica           the simulation; `advance(now)` returns the requests that ended by then
    capacity          the throughput and latency of one replica, in closed form

The model. The GPU does one unit of work at a time and interrupts none: the prefill of one request,
or a decode iteration, which gives every decoding request one token. At most `max_batch` requests
hold a slot; the others wait in order of arrival. Between two units, the next is the first of:

    1. a pause for new weights
    2. the prefill of the request that has waited longest, if a slot is free
    3. a decode iteration of `decode_s + decode_each_s * (requests - 1)`

So a prefill delays the decoding of all others by its whole length, as in an engine without chunked
prefill; with chunks the same work is spread differently, and as many requests are served. A
trajectory that this replica has served under the present weights prefills in `prefill_cached_s`; new
weights clear the cache. Requests that are running then keep their keys and values.

An event (arrival, end of a prefill, of a completion, of a pause) costs O(log max_batch): between
two of them iterations are counted, not simulated.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.simulation.times import Times
from dart_cli.engines.base import LoadMeter

TRAJECTORIES_PER_SLOT = 8
"""Trajectories in the prefix cache per slot of the batch; the least recently used is evicted."""

_LEAST_S = 1e-9  # of an iteration: simulated time advances even where work costs nothing
_ROUNDING = 1e-6  # of an iteration: times that differ by less are the same boundary


@dataclass(frozen=True)
class Costs:
    """The real seconds of each kind of work."""

    prefill_s: float
    prefill_cached_s: float
    decode_s: float
    decode_each_s: float

    @classmethod
    def of(cls, times: Times) -> Costs:
        """Return the costs of a configuration, divided by its speed-up."""
        return cls(
            times.prefill_s / times.speedup,
            times.prefill_cached_s / times.speedup,
            times.decode_s / times.speedup,
            times.decode_each_s / times.speedup,
        )

    def iteration_s(self, decoding: int) -> float:
        """Return the seconds of one token for each of `decoding` requests."""
        return max(_LEAST_S, self.decode_s + self.decode_each_s * (decoding - 1))


@dataclass(eq=False)
class SimulatedRequest:
    """One completion of `tokens` iterations, at least 1."""

    trajectory: str
    tokens: int
    arrived: float
    started: float | None = None  # of its prefill
    ended_at: float | None = None
    iterations: int = 0  # iterations so far; updated at its end and at each change of weights
    versions: list[tuple[int, int]] = field(default_factory=list)  # (from iteration, version)
    last: int = 0  # its last iteration, in the replica's count
    is_cancelled: bool = False

    @property
    def queue_s(self) -> float:
        """The seconds that it waited for a slot."""
        end = self.ended_at if self.started is None else self.started
        return 0.0 if end is None else end - self.arrived

    @property
    def engine_s(self) -> float:
        """The seconds from its prefill to its end."""
        return (
            0.0 if self.started is None or self.ended_at is None else self.ended_at - self.started
        )


@dataclass(eq=False)
class SimulatedSwap:
    """A change of weights: they are received, the replica halts, then they serve."""

    version: int
    pause_s: float
    halted: float | None = None
    ended_at: float | None = None


class Replica:
    """A simulated replica, as the module describes it. All times are seconds of one monotonic clock."""

    def __init__(self, costs: Costs, max_batch: int, *, version: int = -1, now: float = 0.0):
        self.now = now
        self.version = version
        self.prefills = 0
        self.prefills_cached = 0
        self.tokens = 0  # iterations of the completions that ended
        self._costs = costs
        self._max_batch = max_batch
        self._meter = LoadMeter(max_batch, serves=version >= 0, clock=lambda: self.now)
        self._waiting: deque[SimulatedRequest] = deque()
        self._prefilling: SimulatedRequest | None = None
        self._decoding: list[
            tuple[int, int, SimulatedRequest]
        ] = []  # heap by last iteration, then arrival
        self._prefix_cache: OrderedDict[str, None] = (
            OrderedDict()
        )  # trajectories in the prefix cache
        self._swap: SimulatedSwap | None = None
        self._finished: list[SimulatedRequest] = []
        self._arrivals = 0
        self._unit: Literal["nothing", "prefill", "decode", "pause"] = "nothing"
        self._until = math.inf  # when the unit, or the run of iterations, ends
        self._iteration = 0  # iterations done before the present run of them
        self._steps = 0  # iterations of the present run
        self._each = _LEAST_S  # seconds of each of these
        self._since = now  # when the run began

    # --- state --------------------------------------------------------------------

    @property
    def next_event(self) -> float:
        """The moment when the present work ends, if nothing arrives before; infinite if there is no work."""
        return self._until

    @property
    def running(self) -> int:
        """The number of requests that hold a slot."""
        return len(self._decoding) + (self._prefilling is not None)

    @property
    def waiting(self) -> int:
        """The number of requests without a slot."""
        return len(self._waiting)

    def gauges(self) -> dict[str, float]:
        """Return the load up to the latest time given; see LoadMeter."""
        return {
            "in_flight": float(self.running),
            "waiting": float(self.waiting),
            "tokens": float(self.tokens),
            "prefills": float(self.prefills),
            "prefills_cached": float(self.prefills_cached),
            **self._meter.gauges(),
        }

    # --- events ----------------------------------------------------------------------

    def advance(self, now: float) -> list[SimulatedRequest]:
        """Simulate until `now`; return the requests that ended since the last call, in order."""
        self._run_until(now)
        finished, self._finished = self._finished, []
        return finished

    def submit(self, now: float, trajectory: str, tokens: int) -> SimulatedRequest:
        """Take a request that arrives and needs `tokens` iterations, at least 1."""
        self._run_until(now)
        job = SimulatedRequest(trajectory, max(1, tokens), arrived=now)
        self._waiting.append(job)
        self._reschedule()
        return job

    def cancel(self, now: float, job: SimulatedRequest) -> None:
        """Mark a request for which no caller waits any more; its slot is free after the present unit."""
        self._run_until(now)
        job.is_cancelled = True
        if job in self._waiting:
            self._waiting.remove(job)
        elif any(job is queued for _, _, queued in self._decoding):
            self._reschedule()

    def swap(self, now: float, version: int, pause_s: float) -> SimulatedSwap:
        """Take new weights: after the present unit, halt for `pause_s` and load them."""
        self._run_until(now)
        self._swap = SimulatedSwap(version, pause_s)
        self._reschedule()
        return self._swap

    def interrupt(self, now: float) -> list[SimulatedRequest]:
        """End all waiting and running requests with the iterations they have; abort the present unit.

        Returns them. Requests that ended by themselves are not among them: `advance` returns those.
        """
        self._run_until(now)
        if self._unit == "decode":
            completed = math.floor((now - self._since) / self._each + _ROUNDING)
            self._iteration += min(completed, self._steps)
        jobs = [job for _, _, job in sorted(self._decoding, key=lambda entry: entry[1])]
        for job in jobs:
            job.iterations = job.tokens - (job.last - self._iteration)
        if self._prefilling is not None:
            jobs.append(self._prefilling)
        jobs = [job for job in [*jobs, *self._waiting] if not job.is_cancelled]
        for job in jobs:
            self._end(job)
        self._waiting.clear()
        self._decoding.clear()
        self._prefilling = None
        if self._unit != "pause":
            self._start_unit()
        self._meter.run(self.running)
        return jobs

    # --- simulated time ------------------------------------------------------------------

    def _run_until(self, now: float) -> None:
        """Simulate all work that ends by `now`."""
        while self._until <= now:
            self.now = max(self.now, self._until)
            self._end_unit()
            self._start_unit()
        self.now = max(self.now, now)

    def _reschedule(self) -> None:
        """Choose the next unit at the next boundary between two units; called after an event."""
        if self._unit == "decode" and self._has_other_work():
            iterations = math.ceil((self.now - self._since) / self._each - _ROUNDING)
            self._steps = min(self._steps, max(0, iterations))
            self._until = self._since + self._steps * self._each
        elif self._unit == "nothing":
            self._start_unit()
        self._run_until(self.now)

    def _has_other_work(self) -> bool:
        return (
            self._swap is not None
            or (bool(self._waiting) and self.running < self._max_batch)
            or any(job.is_cancelled for _, _, job in self._decoding)
        )

    def _end_unit(self) -> None:
        if self._unit == "pause":
            self._end_pause()
        elif self._unit == "prefill":
            self._end_prefill()
        elif self._unit == "decode":
            self._iteration += self._steps
            while self._decoding and self._decoding[0][0] == self._iteration:
                job = heapq.heappop(self._decoding)[2]
                job.iterations = job.tokens
                self._end(job)
                self._finished.append(job)

    def _start_unit(self) -> None:
        """Start the next unit of work, or the next run of iterations."""
        if any(job.is_cancelled for _, _, job in self._decoding):
            self._decoding = [entry for entry in self._decoding if not entry[2].is_cancelled]
            heapq.heapify(self._decoding)
        if self._swap is not None:
            self._unit = "pause"
            self._swap.halted = self.now
            self._until = self.now + self._swap.pause_s
            self._meter.halt()
        elif self._waiting and self.running < self._max_batch:
            self._unit = "prefill"
            self._prefilling = self._waiting.popleft()
            self._prefilling.started = self.now
            self._until = self.now + self._prefill_s(self._prefilling.trajectory)
        elif self._decoding:
            self._unit = "decode"
            self._since = self.now
            self._each = self._costs.iteration_s(len(self._decoding))
            self._steps = self._decoding[0][0] - self._iteration
            self._until = self._since + self._steps * self._each
        else:
            self._unit, self._until = "nothing", math.inf
        self._meter.run(self.running)

    def _prefill_s(self, trajectory: str) -> float:
        """Return the seconds of the prompt's prefill, and add the prompt to the prefix cache."""
        is_cached = trajectory in self._prefix_cache
        self._prefix_cache[trajectory] = None
        self._prefix_cache.move_to_end(trajectory)
        if len(self._prefix_cache) > TRAJECTORIES_PER_SLOT * self._max_batch:
            self._prefix_cache.popitem(last=False)
        self.prefills += 1
        self.prefills_cached += is_cached
        return self._costs.prefill_cached_s if is_cached else self._costs.prefill_s

    def _end_prefill(self) -> None:
        """Let the request decode from the next iteration on."""
        job, self._prefilling = self._prefilling, None
        if job is not None and not job.is_cancelled:
            job.last = self._iteration + job.tokens
            job.versions.append((0, self.version))
            self._arrivals += 1
            heapq.heappush(self._decoding, (job.last, self._arrivals, job))

    def _end_pause(self) -> None:
        """Let the new weights serve from now on, running requests included."""
        swap, self._swap = self._swap, None
        assert swap is not None
        swap.ended_at = self.now
        self.version = swap.version
        self._prefix_cache.clear()
        for _, _, job in self._decoding:
            job.versions.append((job.tokens - (job.last - self._iteration), swap.version))
        self._meter.go()

    def _end(self, job: SimulatedRequest) -> None:
        job.ended_at = self.now
        self.tokens += job.iterations


# --- the capacity of a replica ------------------------------------------------------------------


@dataclass(frozen=True)
class EngineCapacity:
    """The most that one replica can do."""

    requests_per_s: float  # with all slots in use, all the time
    alone_s: float  # mean latency of a request that has the replica to itself


def mean_tokens(times: Times, max_tokens: int) -> float:
    """Return the mean length of a completion, `min(X, max_tokens)` of a log-normal X.

    With median m = e^mu, spread s and cap c this is
    `m e^(s^2/2) F((ln c - mu)/s - s) + c (1 - F((ln c - mu)/s))`, F the normal distribution
    function: the textbook's limited expected value. Rounding to whole tokens is ignored.
    """
    median, spread, cap = times.completion_tokens, times.completion_sigma, max_tokens
    if spread == 0:
        return float(min(median, cap))
    z = math.log(cap / median) / spread
    uncapped = median * math.exp(spread**2 / 2) * _normal(z - spread)
    return uncapped + cap * (1 - _normal(z))


def _normal(z: float) -> float:
    """Return the standard normal distribution function."""
    return (1 + math.erf(z / math.sqrt(2))) / 2


def capacity(
    times: Times, max_batch: int, max_tokens: int, cached_share: float = 1.0
) -> EngineCapacity:
    """Return the capacity of one replica, if `cached_share` of the prefills find their prefix in the cache.

    With p the mean prefill, T the mean tokens and d(r) the iteration of r requests, a full batch
    spends p on each request's prefill and T iterations on max_batch requests together:

        requests_per_s = 1 / (p + T d(max_batch) / max_batch)        alone_s = p + T d(1)

    Real seconds, the speed-up applied. No order of service does better: whenever a slot is free
    and a request waits, the model fills it first, so every iteration is as full as possible.
    """
    costs = Costs.of(times)
    prefill_s = cached_share * costs.prefill_cached_s + (1 - cached_share) * costs.prefill_s
    tokens = mean_tokens(times, max_tokens)
    each_s = prefill_s + tokens * costs.iteration_s(max_batch) / max_batch
    return EngineCapacity(1 / each_s, prefill_s + tokens * costs.iteration_s(1))
