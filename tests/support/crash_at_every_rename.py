"""Run as a program: shard a source, killed at every rename there is, before and after it; each time resume and compare.

Arguments: dataroot, an empty folder. Prints the number of deaths; exits with 1 where the bytes differ. The renames are
the moments at which a run's state on disk changes for good; each death is a real SIGKILL of a forked process. Odd ones
die before the rename and even ones after it; with FUELRAIL_ATTACK=all each dies both ways.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from support.sharding import digests, shard_nuscenes

EVERY_DEATH = os.environ.get("FUELRAIL_ATTACK") == "all"
OPTIONS = {"shard_size_bytes": 50_000, "splits": {"train": 0.5, "val": 0.5}}


def die_at(number: int, *, after: bool) -> None:
    """Let the rename of this number kill the process."""
    rename = Path.replace
    num_renames = 0

    def replace(self: Path, target: Path) -> Path:
        nonlocal num_renames
        num_renames += 1
        if num_renames == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = rename(self, target)
        if num_renames == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Path.replace = replace


def in_child(run) -> int:
    """Run in a forked process; returns its wait status."""
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - whatever it is, this process ends here
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(root: Path, scratch: Path) -> int:
    expected_folder = scratch / "expected"
    if in_child(lambda: shard_nuscenes(root, expected_folder, **OPTIONS)):
        return 1
    expected = digests(expected_folder)
    deaths = 0
    for number in range(1, 1000):
        for after in (False, True) if EVERY_DEATH else (number % 2 == 0,):
            out = scratch / "out"

            def dying(out=out, number=number, after=after):
                die_at(number, after=after)
                shard_nuscenes(root, out, **OPTIONS)

            status = in_child(dying)
            if not os.WIFSIGNALED(status):  # there were fewer renames: every one has been died at
                sys.stdout.write(f"{deaths}\n")
                return 0 if os.WEXITSTATUS(status) == 0 and digests(out) == expected else 1
            deaths += 1
            published = {
                name: digest
                for name, digest in digests(out).items()
                if not name.startswith(".fuelrail/")
            }
            if any(expected[name] != digest for name, digest in published.items()):
                sys.stderr.write(f"death {deaths}: a file under a final name is not whole\n")
                return 1
            if "dataset.json" in published and published != expected:
                sys.stderr.write(f"death {deaths}: a manifest without all of its files\n")
                return 1
            shard_inodes = {
                name: (out / name).stat().st_ino for name in published if name.endswith(".tar")
            }
            if (
                in_child(lambda out=out: shard_nuscenes(root, out, **OPTIONS))
                or digests(out) != expected
            ):
                sys.stderr.write(f"death {deaths}: went on to other bytes\n")
                return 1
            if any((out / name).stat().st_ino != inode for name, inode in shard_inodes.items()):
                sys.stderr.write(f"death {deaths}: a whole shard was written again\n")
                return 1
            shutil.rmtree(out)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
