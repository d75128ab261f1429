"""What every package may use and no user needs: files, settings, large pages."""
