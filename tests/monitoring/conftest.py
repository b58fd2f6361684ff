"""Puts docker/grafana on the path: its list of panels and its generator belong to no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docker" / "grafana"))
