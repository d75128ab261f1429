"""Kernels for CUDA devices, in Triton; only modules that are imported where one is used import it."""
