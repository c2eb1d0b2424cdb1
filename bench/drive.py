"""What a drive gives: `swapio bench` as a script.

    python bench/drive.py /mnt/nvme0 --out bench/results        # some minutes
    python bench/drive.py --quick /mnt/nvme0                    # half a minute
    python bench/drive.py --tiny --nvme-path /mnt/nvme0         # seconds, for the tests

The work is in `swapio.drive`, so that it is there without these sources too.
"""

from __future__ import annotations

import sys

from swapio.cli import main

if __name__ == "__main__":
    sys.argv[1:] = ["bench", *(argument for argument in sys.argv[1:] if argument != "--nvme-path")]
    main()
