"""Suite `openenv:PROFILE`: environments behind an OpenEnv server, over its WebSocket.

profile    a file that says what an environment's observations, actions and rewards are; templates of payloads
session    one session at a server: requests, replies, errors
env        plays one task at a time in a session, and the suite of a profile
profiles/  the profiles that ship

Messages are those of openenv-core 0.3.0 (`openenv/core/env_server`); docs/environments/openenv.md.
"""
