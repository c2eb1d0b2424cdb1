"""Two drives of unequal speed as one: what they give together, and who got which bytes.

    python bench/stripes.py --nvme-path /mnt/nvme0                  # both directories there, slowed down to 300 and 100 MB/s
    python bench/stripes.py --nvme-path /mnt/nvme0 /mnt/nvme1 --speeds 0 0   # two drives as they are
    python bench/stripes.py --tiny --nvme-path /mnt/nvme0           # for the tests

A drive is slowed down by holding each transfer until the drive would have ended it at that speed. The shares follow the speeds that are
measured when the store is opened.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from swapio.io import DirectStorage, IOThreads, Some, Storage, StripedStorage, WrapperStorage, aligned_buffer, measure_speeds
from swapio.report import machine


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme-path", nargs="+", default=["."])
    parser.add_argument("--speeds", nargs=2, type=float, default=(300.0, 100.0), help="MB/s of the two")
    parser.add_argument("--nbytes", type=int, default=512 << 20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.nbytes, args.repeats = 16 << 20, 1
    paths = (args.nvme_path * 2)[:2]
    result: dict[str, Any] = {"machine": machine(), "options": {k: str(v) for k, v in vars(args).items()}, "runs": []}
    for action in ("read", "write"):
        ratios, shares, ideals = [], [], []
        for _ in range(args.repeats):
            members = [Slow(DirectStorage(p), 1e6 * s) for p, s in zip(paths, args.speeds, strict=True)]
            alone = [throughput(m, action, args.nbytes // 4) for m in members]
            with StripedStorage(members, weights=measure_speeds(members)) as striped:
                for member in members:
                    member.moved_nbytes = 0
                together = throughput(striped, action, args.nbytes)
            ratios.append(together / sum(alone))
            shares.append(members[0].moved_nbytes / sum(m.moved_nbytes for m in members))
            ideals.append(alone[0] / sum(alone))
            result["runs"].append({"action": action, "alone": alone, "together": together, "share_of_first": shares[-1]})
        print(
            f"{action}: together {statistics.median(ratios):.1%} of the sum of both alone; the first got {statistics.median(shares):.1%} "
            f"of the bytes, by its speed {statistics.median(ideals):.1%}"
        )
    if args.out:
        (args.out / "stripes.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
