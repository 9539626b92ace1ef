"""Run as a program: delete clips, killed at changes of the disk; each time by the same command again, and compare.

Arguments: dataset, layer, keys file, an empty folder, and which deaths: "all", or a number of random ones. Prints the
number of deaths; exits with 1 where what is left differs from what an undisturbed call leaves. Renames, links and
removals are the moments at which the disk changes for good; each death is a real SIGKILL of a forked process.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from pathlib import Path

from fuelrail.sharding.forget import forget
from support.crash_at_every_rename import in_child
from support.sharding import digests


def counting(fatal_number: int | None, *, after: bool) -> list[int]:
    """Count the changes, and die at one of them."""
    count = [0]

    def watched(change):
        def call(*args, **options):
            count[0] += 1
            number = count[0]
            if number == fatal_number and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return change(*args, **options)
            finally:  # also where there was nothing to change
                if number == fatal_number:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    Path.replace, Path.unlink = watched(Path.replace), watched(Path.unlink)
    os.link, os.unlink, os.rmdir = (
        watched(os.link),
        watched(os.unlink),
        watched(os.rmdir),
    )  # rmtree's too
    return count


def main(dataset: Path, layer: Path, keys: Path, scratch: Path, choice: str) -> int:
    def prepare() -> tuple[Path, dict]:
        work = scratch / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(dataset, work / "dataset")
        shutil.copytree(layer, work / "layer")
        cache = work / "cache" / "spans" / os.environ["FINGERPRINT"] / "data"
        cache.mkdir(parents=True)
        (cache / "0").write_bytes(b"a span")
        return work, {"layers": [work / "layer"], "caches": [work / "cache"]}

    work, options = prepare()
    counts = scratch / "count"

    def undisturbed() -> None:
        count = counting(None, after=False)
        forget(work / "dataset", keys, **options)
        counts.write_text(str(count[0]))

    if in_child(undisturbed):
        return 1
    expected = digests(work)
    num = int(counts.read_text())
    deaths = [(death, after) for death in range(1, num + 1) for after in (False, True)]
    if choice != "all":
        deaths = random.Random(os.environ.get("FUELRAIL_SEED", "1")).sample(deaths, int(choice))
    for death, after in deaths:
        work, options = prepare()

        def dying(work=work, options=options, death=death, after=after) -> None:
            counting(death, after=after)
            forget(work / "dataset", keys, **options)

        if not os.WIFSIGNALED(in_child(dying)):
            sys.stderr.write(f"death {death}: did not come\n")
            return 1
        if in_child(lambda work=work, options=options: forget(work / "dataset", keys, **options)):
            sys.stderr.write(f"death {death} {after}: could not be continued\n")
            return 1
        if digests(work) != expected:
            sys.stderr.write(f"death {death} {after}: other bytes\n")
            return 1
        if (work / "cache" / "spans" / os.environ["FINGERPRINT"]).exists():
            sys.stderr.write(f"death {death} {after}: a cache is left\n")
            return 1
    sys.stdout.write(f"{len(deaths)} of {2 * num}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:5]), sys.argv[5]))
