"""MobileGym's phone in a browser with its tasks and judges, from the user's folder: `mobilegym:FOLDER`.

suite      MobilegymSuite: MobileGym's tasks, their options, and a check of what they need
tasks      the list of tasks, and the interpreter that has the packages of MobileGym's bench_env
env        MobilegymEnv, which implements the GuiEnv contract
gestures   GUI actions as calls of the phone's input
program    the program that runs in that interpreter
"""
