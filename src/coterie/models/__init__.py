"""A module as a row of one flat matrix: `layout`, the `networks` that studies name, `simplex_layers`."""
