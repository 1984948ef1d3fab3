"""Suite `timed`: a GUI that only takes time, to measure scheduling without slow environments.

profiles   how long resets, steps and episodes take, and their means
screens    screenshots that are cheap, real and different at every step
env        TimedEnv behind the GuiEnv contract, TimedSuite
"""

from envs.timed.profiles import PROFILES, Expected, Profile, expected

__all__ = ["PROFILES", "Expected", "Profile", "expected"]
