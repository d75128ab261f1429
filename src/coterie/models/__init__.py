"""A module as a row of a flat matrix: `layout`, `networks` by name, `simplex_layers`."""
