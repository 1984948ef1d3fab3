"""`dart`: reinforcement learning for GUI agents, as a set of command-line processes."""

__version__ = "0.1.0"
