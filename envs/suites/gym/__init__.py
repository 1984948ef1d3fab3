"""gymnasium's environments as suites `gym:ENV_ID`, with hooks of the user's.

env     GymEnv, which keeps the GuiEnv contract, and GymSuite, of an id or a file of hooks
hooks   GymHooks: image, action and verdict, which say what a screen, a click and a success are
"""
