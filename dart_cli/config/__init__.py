"""The configuration of a run: read, checked whole, explained."""
