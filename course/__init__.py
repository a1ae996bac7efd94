"""The course's machinery: the command `course`, the exercises' engine, the upkeep of tables.

Lessons never import it.
"""

import sys

if sys.platform == "win32":  # its engine forks processes, which Windows cannot
    sys.exit("This course runs on Linux and macOS. On Windows, use WSL2, and clone into its home.")
