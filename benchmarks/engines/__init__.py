"""How fast the engines are on this machine, compared with the usual loop of research code: `python -m benchmarks.engines`."""
