"""One module per arm of the comparison; each runs in a process of its own and writes one JSON result."""
