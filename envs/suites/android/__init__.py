"""Android devices and emulators over adb. Experimental: written without a device to test on.

env       AndroidEnv, which keeps the GuiEnv contract, and suite `android`
adb       runs adb: commands with a deadline, screenshots; reads views as nodes for an explorer
actions   writes GUI actions as scripts for a device's shell
"""
