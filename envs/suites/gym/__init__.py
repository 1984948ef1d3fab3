"""gymnasium's environments as suites `gym:ENV_ID`, with hooks that the user writes.

env     GymEnv, which implements the GuiEnv contract, and GymSuite, named by an id or a file of hooks
hooks   GymHooks, the base class of hooks: they define the screen, the actions and the verdict
"""
