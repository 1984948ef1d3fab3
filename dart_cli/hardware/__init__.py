"""The hardware that torch computes on. No other package names a vendor of GPUs.

accelerator   devices, streams, memory and collectives of a GPU
device        the device that a configuration asks for, and the error when its memory is too small
"""
