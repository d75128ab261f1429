"""How fast the engines are on this machine, beside the usual loop of research code: `python -m benchmarks.engines`."""
