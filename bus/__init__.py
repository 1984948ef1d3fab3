"""The bus: typed messages over ZeroMQ, msgpack headers beside raw frames.

messages    what processes tell each other: steps, batches, heartbeats
weights     the same of weight sets
ranks       the same between the ranks of one trainer
codec       message <-> wire frames, limits checked
packed      lists of numbers as raw frames beside the header
endpoints   addresses, private directories and CURVE keys of a run
requester   request/reply, the client's end
replier     request/reply, the server's end
pubsub      publish/subscribe for telemetry, and its forwarder
channel     a ZeroMQ socket in an asyncio loop, by callbacks
transport   opening ZeroMQ sockets: limits, time-outs, keys
refusals    warnings about refused messages, limited in rate
heartbeat   which processes live and what they wait for
snapshot    the run at one moment, as `dart status` gets it
loopback    whether other machines can reach an address
temperatures    the range of sampling temperatures
errors      every error raised on purpose, in one tree
"""
