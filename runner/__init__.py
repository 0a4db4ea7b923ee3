"""`run`: a declarative, config-driven experiment runner for post-training language models."""

__version__ = "0.1.0"
