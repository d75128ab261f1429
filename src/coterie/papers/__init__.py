"""The five papers: their published numbers, beside which a study's results are set, and their own analyses."""
