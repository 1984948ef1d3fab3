"""Environments: real GUIs behind one contract."""
