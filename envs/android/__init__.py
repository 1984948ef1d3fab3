"""Android devices and emulators over adb. Experimental: written without a device to test on.

suite     suite `android`: task files and options
env       AndroidEnv, which keeps the GuiEnv contract
adb       adb as a program: commands with a deadline, screenshots
actions   GUI actions as scripts for a device's shell
"""
