"""BrowserGym's tasks by pixels and coordinates, in an interpreter that has the package `browsergym`.

suite        suite `browsergym`: its tasks, options, and what they need
tasks        which tasks there are, what each benchmark needs, and the interpreter that has them
env          BrowsergymEnv, which keeps the GuiEnv contract; the images of a goal
calls        GUI actions as calls of the program
program      the program itself, which runs in that interpreter
"""
