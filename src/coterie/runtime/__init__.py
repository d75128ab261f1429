"""A run in a simulation or between machines: settings, rounds, record, checkpoint, models."""
