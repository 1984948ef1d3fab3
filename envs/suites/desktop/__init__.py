"""Real applications on a virtual display: LibreOffice, mousepad, pcmanfm, galculator, GIMP.

suite            suite `desktop`: its task files, its options, and what each task requires
env              DesktopEnv, which keeps the GuiEnv contract
session          one task on one desktop: set-up steps, actions, settled screens
desktop          one desktop: virtual display, window manager, message bus, HOME
keeper           the process that starts, limits and ends a desktop's programs
host_resources   folders, display sockets, users and programs of the host
home             writes the settings of the applications into a fresh HOME
x11              the X display: windows, pings, clipboard, input events
inputs           performs GUI actions as input events (XTEST)
screen           reads Xvfb's framebuffer, waits until it has settled, encodes it; CPU time of processes
files            makes a task's files
getters          the values that an evaluator reads, its functions, and the verdict
accessibility    returns the accessibility tree, which `atspi` reads in a separate process
atspi            the program that reads the accessibility tree
"""
