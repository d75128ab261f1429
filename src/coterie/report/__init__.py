"""The report page, its live version, figures, and export of runs to trackers."""
