"""One run, in a simulation or between machines: settings, loop of rounds, record, checkpoint, trained models."""
