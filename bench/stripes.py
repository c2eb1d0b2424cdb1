"""Two drives of unequal speed as one: what they give together, and who got which bytes.

    python bench/stripes.py --nvme-path /mnt/nvme0                  # both directories there, slowed down to 300 and 100 MB/s
    python bench/stripes.py --nvme-path /mnt/nvme0 --second-path /mnt/nvme1 --speeds 0 0   # two drives as they are
    python bench/stripes.py --tiny --nvme-path /mnt/nvme0           # for the tests

A drive is slowed down by holding each transfer until the drive would have ended it at that speed. The shares follow the speeds that are
measured when the store is opened.
"""

from __future__ import annotations

import os
import queue
import statistics
import sys
import threading
import time
from typing import Any

from bench._run import Cells, front_parser, save
from swapio.io import DirectStorage, IOThreads, Some, Storage, StripedStorage, WrapperStorage, aligned_buffer, measure_speeds


class Slow(WrapperStorage):
    """A drive of `bytes_per_s` at most; 0 leaves it as it is."""

    def __init__(self, inner: Storage, bytes_per_s: float) -> None:
        super().__init__(inner)
        self.bytes_per_s = bytes_per_s
        self.moved_nbytes = 0
        self._lock = threading.Lock()
        self._free_at = 0.0

    def _slowly(self, some: Some, offset: int, buffer: memoryview, name: str) -> int:
        with self._lock:
            until = max(self._free_at, time.perf_counter()) + (buffer.nbytes / self.bytes_per_s if self.bytes_per_s else 0.0)
            self._free_at = until
            self.moved_nbytes += buffer.nbytes
        moved = some(offset, buffer, name)
        time.sleep(max(until - time.perf_counter(), 0.0) if self.bytes_per_s else 0.0)
        return moved

    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        return self._slowly(super()._read_some, offset, buffer, name)

    def _write_some(self, offset: int, buffer: memoryview, name: str) -> int:
        return self._slowly(super()._write_some, offset, buffer, name)


def throughput(storage: Storage, action: str, nbytes: int) -> float:
    """Bytes per second of one transfer after another, two in flight, over `nbytes` of a storage."""
    piece = min(32 << 20, nbytes)
    buffers = [aligned_buffer(piece, os.urandom(4096)) for _ in range(2)]
    extent = storage.reserve(nbytes, name="bench")
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    with IOThreads(storage) as threads:

        def run(what: str) -> float:
            start = time.perf_counter()
            starts = range(extent.offset, extent.offset + nbytes, piece)
            for i, at in enumerate(starts):
                if i >= 2 and (error := ended.get(timeout=120)) is not None:
                    raise error
                getattr(threads, what)(at, buffers[i % 2], name="bench", priority=0, done=ended.put)
            for _ in starts[-2:]:
                if (error := ended.get(timeout=120)) is not None:
                    raise error
            return nbytes / (time.perf_counter() - start)

        run("write")
        speed = run(action)
    storage.free(extent)
    return speed


def main(argv: list[str]) -> int:
    parser = front_parser(__doc__)
    parser.add_argument("--second-path", help="default: the same as --nvme-path")
    parser.add_argument("--speeds", nargs=2, type=float, default=(300.0, 100.0), help="MB/s of the two")
    parser.add_argument("--nbytes", type=int, default=512 << 20)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    if args.tiny:
        args.nbytes, args.repeats = 16 << 20, 1
    runs: list[dict[str, Any]] = []
    rows: Cells = [("", "together, of the sum of both", "share of the first", "by its speed")]
    for action in ("read", "write"):
        for _ in range(args.repeats):
            paths = args.nvme_path, args.second_path or args.nvme_path
            members = [Slow(DirectStorage(p), 1e6 * s) for p, s in zip(paths, args.speeds, strict=True)]
            alone = [throughput(m, action, args.nbytes // 4) for m in members]
            with StripedStorage(members, weights=measure_speeds(members)) as striped:
                for member in members:
                    member.moved_nbytes = 0
                together = throughput(striped, action, args.nbytes)
            share = members[0].moved_nbytes / sum(m.moved_nbytes for m in members)
            runs.append({
                "action": action, "alone_bytes_per_s": alone, "together_bytes_per_s": together, "ratio": together / sum(alone),
                "share_of_first": share, "speed_of_first": alone[0] / sum(alone),
            })  # fmt: skip
        of_action = [r for r in runs if r["action"] == action]
        medians = (statistics.median(r[name] for r in of_action) for name in ("ratio", "share_of_first", "speed_of_first"))
        rows.append((action, *(f"{m:.1%}" for m in medians)))
    save("stripes", args, argv, {"two drives as one": rows}, runs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
