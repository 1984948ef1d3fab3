"""A GUI that only takes its time: suite `timed`, to measure scheduling without slow environments.

profiles.py   how long resets, steps and episodes take, and what that comes to on average
screens.py    screenshots that are cheap, real and different at every step
env.py        TimedEnv behind the GuiEnv contract, TimedSuite
"""

from envs.timed.profiles import PROFILES, Expected, Profile, expected

__all__ = ["PROFILES", "Expected", "Profile", "expected"]
