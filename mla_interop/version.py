"""The version, in one place: pyproject.toml reads this file."""

__version__ = "0.1.0"
