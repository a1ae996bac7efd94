"""The course's machinery: the command `course`, the exercises' engine, the upkeep of tables.

Lessons never import it.
"""
