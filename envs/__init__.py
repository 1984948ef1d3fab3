"""Environments: real GUIs behind one contract.

contract/   what an environment, a task and an action are; suites by name
tools/      parts with which several suites are built: input events, child programs, task files
suites/     the suites that ship with dart

An environment of your own needs one import line:

    from envs import Click, GuiEnv, Observation, Task, Verdict, task_of

dart's own modules import each name from the module that defines it.
"""

from envs.contract.actions import (
    Action,
    Answer,
    Click,
    Done,
    DoubleClick,
    Drag,
    Fail,
    Goto,
    KeyDown,
    KeyPress,
    KeyUp,
    MouseDown,
    MouseUp,
    Move,
    Scroll,
    TripleClick,
    Type,
    Wait,
)
from envs.contract.base import GuiEnv, Observation, Solvable, Task, Verdict, task_of
from envs.contract.registry import Suite, find_task, load_suite, make_env

__all__ = [
    "Action",
    "Answer",
    "Click",
    "Done",
    "DoubleClick",
    "Drag",
    "Fail",
    "Goto",
    "GuiEnv",
    "KeyDown",
    "KeyPress",
    "KeyUp",
    "MouseDown",
    "MouseUp",
    "Move",
    "Observation",
    "Scroll",
    "Solvable",
    "Suite",
    "Task",
    "TripleClick",
    "Type",
    "Verdict",
    "Wait",
    "find_task",
    "load_suite",
    "make_env",
    "task_of",
]
