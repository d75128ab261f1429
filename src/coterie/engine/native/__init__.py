"""Whole training steps as native programs, for plain stacks of layers on a CPU."""
