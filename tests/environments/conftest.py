"""Makes `fakes` importable, as a user's own module would be."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
