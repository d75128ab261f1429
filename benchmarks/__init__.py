"""Measurements of Coterie; a package, so that `python -m benchmarks.engines` finds no installed namesake."""
