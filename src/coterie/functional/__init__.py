"""The formulas of the papers, as pure functions on tensors: one module for each family."""
