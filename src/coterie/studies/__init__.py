"""Methods x seeds over one federation: from a study file or from Python, with sweeps and tuning."""
