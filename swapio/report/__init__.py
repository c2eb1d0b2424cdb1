"""What people look at: pictures and tables of a run."""

from ._training import plot_training, training_table

__all__ = ["plot_training", "training_table"]
