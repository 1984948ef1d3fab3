"""Suite `openenv:PROFILE`: environments behind an OpenEnv server, over its WebSocket.

env        OpenenvEnv, which plays one task at a time in a session, and the suite of a profile
session    a session at a server: requests, replies, errors
profile    reads a profile, which describes an environment's observations, actions and rewards
profiles/  the profiles that ship with dart

The messages are defined by openenv-core 0.3.0 (`openenv/core/env_server`); docs/environments/openenv.md
explains the suite.
"""
