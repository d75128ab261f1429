"""The formulas of the papers: pure functions on tensors, a module for each family."""
