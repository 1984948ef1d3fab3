"""The bus: typed messages over ZeroMQ, with msgpack headers beside raw frames.

messages      the messages between processes: steps, batches, heartbeats
weights       the messages about weight sets
ranks         the messages between the ranks of one trainer
codec         converts messages to wire frames and back, within limits
packed        lists of numbers that are raw frames beside the header
endpoints     addresses, private directories and CURVE keys of a run
requests      request/reply, both ends
sockets       opens ZeroMQ sockets and drives them in an asyncio loop
pubsub        publish/subscribe for telemetry, and its forwarder
heartbeat     sends and watches heartbeats: which processes live and what they wait for
snapshot      the run at one moment, for `dart status`
temperatures  the range of sampling temperatures
errors        every error that is raised on purpose, in one tree
error_texts   parts of error texts that several packages share
"""
