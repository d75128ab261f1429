"""Measurements of Coterie. A package, so that `python -m benchmarks.engines` finds this one and no installed namesake."""
