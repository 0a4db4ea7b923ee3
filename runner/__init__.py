"""`run`: a declarative, config-driven experiment runner for post-training language models.

Other packages import `runner.spec`, `runner.interfaces` and `runner.testing`; everything else is private.
"""

__version__ = "0.1.0"
