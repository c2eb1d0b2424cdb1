"""Checkpoints on a drive: tensors by name and shape in `torch.distributed.checkpoint`'s format, in folders that are whole or not there."""

from ._boxes import Box, boxes
from ._deepspeed import DeepSpeedStored, is_deepspeed
from ._export import DTYPES, as_weight, export, export_dtype, exported, get_fp32_state_dict, model_config_text
from ._folder import (
    Part,
    Progress,
    check_free,
    check_tag,
    checker,
    damage,
    find,
    latest_tag,
    leftovers,
    listed,
    publish,
    remove_old,
    resolve,
    set_latest,
    tags,
    temporary_folder,
    verify,
)
from ._inspect import inspect
from ._names import CLIENT_STATE, ENGINE, RANDOM, key
from ._safetensors import Entry, SafetensorsFolder, SafetensorsWriter
from ._tensors import Stored, Stretch
from ._write import StretchWriter, finish_folder

__all__ = [
    "CLIENT_STATE",
    "DTYPES",
    "ENGINE",
    "RANDOM",
    "Box",
    "DeepSpeedStored",
    "Entry",
    "Part",
    "Progress",
    "SafetensorsFolder",
    "SafetensorsWriter",
    "Stored",
    "Stretch",
    "StretchWriter",
    "as_weight",
    "boxes",
    "check_free",
    "check_tag",
    "checker",
    "damage",
    "export",
    "export_dtype",
    "exported",
    "find",
    "finish_folder",
    "get_fp32_state_dict",
    "inspect",
    "is_deepspeed",
    "key",
    "latest_tag",
    "leftovers",
    "listed",
    "model_config_text",
    "publish",
    "remove_old",
    "resolve",
    "set_latest",
    "tags",
    "temporary_folder",
    "verify",
]
