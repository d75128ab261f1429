"""One run: its settings, its rounds, its record and its checkpoints."""
