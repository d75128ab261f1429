"""The five papers beside our results: published `numbers`, `compare`, their `analyses` and `figures`."""
