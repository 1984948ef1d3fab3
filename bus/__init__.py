"""The bus: typed messages over ZeroMQ, msgpack headers beside raw frames."""
