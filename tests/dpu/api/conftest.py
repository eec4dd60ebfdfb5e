from __future__ import annotations

import sys
from pathlib import Path

# The fake is a plain module beside the tests: it is also run as a process.
sys.path.insert(0, str(Path(__file__).parent))
