"""The cases that a GPU has answered live beside the golden values; both folders see them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "golden"))
