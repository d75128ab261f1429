"""Studies: methods x seeds over one federation, from a file or from Python; sweeps and tuning."""
