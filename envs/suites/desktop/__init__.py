"""Real applications on a virtual display: LibreOffice, mousepad, pcmanfm, galculator, GIMP.

suite            suite `desktop`: task files, options, requirements of each
env              DesktopEnv, which keeps the GuiEnv contract
session          one task on one desktop: set-up steps, actions, settled screens
desktop          one desktop: virtual display, window manager, message bus, HOME
keeper           the process that starts, limits and ends a desktop's programs
host_resources   folders, display sockets, users and programs of the host
home             settings of the applications in a fresh HOME
x11              the X display: windows, pings, clipboard, input events
inputs           GUI actions as input events (XTEST)
screen           Xvfb's framebuffer: settle, encode; CPU time of processes
draws            values that a task draws from its seed
files            makes a task's files
getters          values that an evaluator reads, its functions, the verdict
accessibility    the accessibility tree, read by atspi in a process of its own
atspi            the program that reads it
"""
