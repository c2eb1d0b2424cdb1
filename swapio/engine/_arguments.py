"""The command line arguments that DeepSpeed's scripts and launchers pass."""

from __future__ import annotations

import argparse

__all__ = ["add_config_arguments"]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a parser, and return it; then `swapio.initialize(args, ...)` finds the config.

    `--deepspeed` is for the script's own use and changes nothing here. The names before the year 2020, `--deepscale` and
    `--deepscale_config`, mean the same.
    """
    group = parser.add_argument_group("swapio", "the config, by DeepSpeed's names")
    group.add_argument("--deepspeed", "--deepscale", action="store_true", help="for the script's own use; it changes nothing here")
    group.add_argument("--deepspeed_config", "--deepscale_config", metavar="FILE", help="the config, a JSON file in DeepSpeed's format")
    return parser
