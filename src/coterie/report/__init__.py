"""The page and the figures that show what happened in a study."""
