"""One run: its settings, rounds, record and checkpoints."""
