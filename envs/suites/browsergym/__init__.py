"""BrowserGym's tasks by pixels and coordinates, in an interpreter that has the package `browsergym`.

suite     the suite `browsergym`: its tasks, its options, and a check of what they need
tasks     the lists of tasks, the needs of each benchmark, and the interpreter that has BrowserGym
env       BrowsergymEnv, which implements the GuiEnv contract; the images of a goal
calls     GUI actions as calls of the program
program   the program that runs in that interpreter
"""
