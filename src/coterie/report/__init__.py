"""The page and the figures that show what happened in a study; `watch` shows the page live, `trackers` pass runs on."""
