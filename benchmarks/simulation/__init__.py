"""Simulated GUIs, GPUs and updates, to measure scheduling with real processes, bus and database.

times      how long everything takes, from [env.options]
profiles   how long resets, steps and episodes of a kind of GUI take, and their means
screens    screenshots that are cheap, real and different at every step
suite      TimedSuite: `env.suite = "benchmarks.simulation.suite:TimedSuite"`
gpu        a simulated GPU replica: continuous batching, exact to the token
engine     timed_engine: `rollout.engine = "benchmarks.simulation.engine:timed_engine"`
learner    timed_learner: `train.learner = "benchmarks.simulation.learner:timed_learner"`
bound      the physical limit on throughput
recording  one run, observed from outside: heartbeats, CPU, memory, kills
measure    a recording and its database -> throughput, utilisation, losses
timeline   a picture of who was busy when
hosts      several hosts on one machine: network namespaces
efficiency  the same run, scheduled in different ways, compared (a command)
scale      whether the data service keeps up with very many slots (a command)
"""
