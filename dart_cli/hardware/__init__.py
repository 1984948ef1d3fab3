"""The accelerator that torch computes on; no other room names a vendor.

accelerator   devices, streams, memory and collectives of a GPU
"""
