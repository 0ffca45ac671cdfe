"""Makes `admission_rig` importable, also by the name of its environments."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
