"""Internal helpers of all packages: files, settings, large pages."""
