"""Models that answer requests: engines, the HTTP server in front of one, and what `run serve` starts."""
