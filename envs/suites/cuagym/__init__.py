"""CUA-Gym's mocks of web applications and its task bundles, from the user's folder: `cuagym:FOLDER`.

suite      CuagymSuite: the tasks of a folder, their options, and a check of what they need
bundles    the bundles and the mocks that a folder has
env        CuagymEnv, which implements the GuiEnv contract
programs   runs the setup and reward programs of bundles
program    the program that runs them, in processes of their own
"""
