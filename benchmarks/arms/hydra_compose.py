"""Hydra alone: the config of a recipe, composed from one folder and nothing else.

python -m arms.hydra_compose CONFIG_DIR [OVERRIDE …]
"""

from __future__ import annotations

import sys

from hydra import compose, initialize_config_dir

if __name__ == "__main__":
    with initialize_config_dir(sys.argv[1], version_base="1.3"):
        compose("job", overrides=sys.argv[2:])
