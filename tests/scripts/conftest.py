"""The scripts are run by path, so their folder is on the path that modules are imported from; here too."""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
