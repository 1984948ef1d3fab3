"""The bus: typed messages over ZeroMQ, msgpack headers beside raw frames.

messages    what processes tell each other: steps, batches, heartbeats
weights     the same of weight sets
ranks       the same between the ranks of one trainer
codec       message <-> wire frames, limits checked
packed      lists of numbers as raw frames beside the header
endpoints   addresses, private directories and CURVE keys of a run
requests    request/reply, both ends
sockets     opening ZeroMQ sockets and driving them in an asyncio loop
pubsub      publish/subscribe for telemetry, and its forwarder
heartbeat   which processes live and what they wait for
snapshot    the run at one moment, as `dart status` gets it
temperatures    the range of sampling temperatures
errors      every error raised on purpose, in one tree
error_texts   parts of error texts that several packages share
"""
