"""Published `numbers` of the five papers, and how to `compare`, analyze and plot our results."""
