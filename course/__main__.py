"""`python -m course` is `course`."""

import sys

from course.command_line import run

sys.exit(run())
