"""Estimates of what each ZeRO stage needs."""

from . import stage3, stage_1_and_2

__all__ = ["stage3", "stage_1_and_2"]
