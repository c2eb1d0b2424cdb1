"""Checkpoints on a drive: tensors by name and shape in `torch.distributed.checkpoint`'s format, in folders that are whole or not there."""

from ._boxes import Box, boxes
from ._folder import (
    Part,
    Progress,
    check_tag,
    damage,
    find,
    latest_tag,
    leftovers,
    publish,
    remove_old,
    resolve,
    set_latest,
    tags,
    temporary_folder,
    verify,
)
from ._tensors import Stored, Stretch
from ._write import StretchWriter, finish_folder

__all__ = [
    "Box",
    "Part",
    "Progress",
    "Stored",
    "Stretch",
    "StretchWriter",
    "boxes",
    "check_tag",
    "damage",
    "find",
    "finish_folder",
    "latest_tag",
    "leftovers",
    "publish",
    "remove_old",
    "resolve",
    "set_latest",
    "tags",
    "temporary_folder",
    "verify",
]
