"""Checkpoints on a drive: tensors by name and shape in `torch.distributed.checkpoint`'s format, in folders that are whole or not there."""

from ._boxes import Box, boxes
from ._folder import FileSum, check_tag, find, latest_tag, leftovers, publish, set_latest, sum_of, tags, temporary_folder, verify
from ._tensors import Stored, Stretch, load_stretches, write_stretches

__all__ = [
    "Box",
    "FileSum",
    "Stored",
    "Stretch",
    "boxes",
    "check_tag",
    "find",
    "latest_tag",
    "leftovers",
    "load_stretches",
    "publish",
    "set_latest",
    "sum_of",
    "tags",
    "temporary_folder",
    "verify",
    "write_stretches",
]
