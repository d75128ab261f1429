"""Whole training steps of modules as native programs, on a CPU."""
