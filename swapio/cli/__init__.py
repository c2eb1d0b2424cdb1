"""The command line: `swapio` and `python -m swapio`."""

from ._app import main

__all__ = ["main"]
