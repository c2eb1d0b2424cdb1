"""Where results go."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError

__all__ = ["output_file"]


def output_file(folder: Path, name: str) -> Path:
    """`folder / name`, replacing what an earlier run left there.

    Raises:
        ConfigError: the folder cannot be written.
    """
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch()
        path.unlink()
    except OSError as error:
        raise ConfigError(f"--out: {folder} cannot be written ({error.strerror}); give another folder", key="out", value=folder) from error
    return path
