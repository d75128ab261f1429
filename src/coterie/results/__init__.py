"""Stored runs, read again: summaries, graphs of which models each client used, traffic."""
