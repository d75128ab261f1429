"""A module as a row of one matrix: `layout`; the networks that studies name: `networks`; `simplex_layers`."""
