"""``loadtest`` is imported from the repository's root; its processes find it there too, being started from there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
