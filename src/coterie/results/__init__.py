"""Stored runs, read again: summaries, graphs of who learned from whom, traffic."""
