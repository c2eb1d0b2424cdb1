"""Files read through memory mappings.

[Note: mapped reads]
A mapping lives for one transfer: one of the whole file would count as this process's memory, page by page. A page behind the end of the
file is SIGBUS when touched, so nothing is touched before `MADV_POPULATE_READ` has succeeded, which answers with an errno instead; what is
left is a truncation within the microseconds of the copy. Python holds its lock in `madvise`, so the drive is waited for in `sendfile` to
/dev/null, which does not. Writes go through `pwritev` on the same page cache: a store to a mapped page would first read the page from the
drive, and a full drive would be SIGBUS.
"""

from __future__ import annotations

import errno
import mmap
import os

from ._buffers import copy_bytes
from ._file import FileStorage

__all__ = ["MmapStorage"]

_MADV_POPULATE_READ = 22  # Linux 5.14; EINVAL before


class MmapStorage(FileStorage):
    """A file in the page cache, read through mappings; what is read often stays in memory that the kernel may take back."""

    kind = "mmap"
    hint = '; mapping needs Linux 5.14, use backend="aiofiles"'
    _null = -1

    def _start(self) -> None:
        self._null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        nbytes = self._fill_cache(offset, buffer.nbytes)
        if not nbytes:
            return 0
        within = offset % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(self._fd, within + nbytes, prot=mmap.PROT_READ, offset=offset - within)
            mapped.madvise(_MADV_POPULATE_READ)
        except ValueError:  # the file became shorter before it was mapped
            return 0
        except OSError as error:
            if error.errno == errno.EFAULT:  # or after
                return 0
            raise
        copy_bytes(buffer[:nbytes], memoryview(mapped)[within:])
        return nbytes

    def _fill_cache(self, offset: int, nbytes: int) -> int:
        """Wait until the bytes are in the page cache; how many there are."""
        return os.sendfile(self._null, self._fd, offset, nbytes)

    def _write_some(self, offset: int, buffer: memoryview, name: str) -> int:
        return os.pwritev(self._fd, [buffer], offset)

    def _release(self) -> None:
        if self._null >= 0:
            os.close(self._null)
        super()._release()
