"""Android devices and emulators over adb. Experimental: written without a device to test on.

env       AndroidEnv, which keeps the GuiEnv contract, and suite `android`
adb       adb as a program: commands with a deadline, screenshots; views as nodes for an explorer
actions   GUI actions as scripts for a device's shell
"""
