"""Where results go."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError

__all__ = ["output_file"]


def output_file(folder: Path, name: str, *, asked: str = "folder") -> Path:
    """`folder / name`, found to be writable; what an earlier run left there stays until the new result replaces it.

    Args:
        asked: what `--out` names, "folder" or "file".

    Raises:
        ConfigError: it cannot be written.
    """
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        wrong = path if asked == "file" else folder
        raise ConfigError(f"--out: {wrong} cannot be written ({error.strerror}); give another {asked}", key="out", value=wrong) from error
    return path
