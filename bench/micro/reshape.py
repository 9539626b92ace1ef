"""Time until a running loader's next batch after `reshape`, beside a new loader at that position.

python -m fuelrail.bench.micro.reshape [--out FILE]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fuelrail as fr
from fuelrail.bench.micro.timing import Effort, TimedContest, compare, main

GLOBAL_BATCH = 12


def measure_reshape(effort: Effort) -> Iterator[TimedContest]:
    """Measure a synthetic dataset, of pictures of one size."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "dataset")
        fr.synth(Path(folder, "source"), size=(320, 180), lidar_sweeps=0, seed=7)
        source = f"nuscenes:{folder}/source"
        fr.shard(source, root, options={"version": "v1.0-mini"}, splits={"train": 1.0}, workers=1)
        for where in (None, "process"):
            make = partial(
                fr.DataLoader,
                root,
                GLOBAL_BATCH,
                shuffle=True,
                seed=7,
                num_workers=2,
                where=where,
                world=fr.World(),
            )
            running: Any = make()
            running.commit()
            batches = iter(running)
            next(batches)
            running.commit()
            sizes = [2, 3]

            def reshape_and_take(
                running: Any = running,
                batches: Any = batches,
                sizes: list[int] = sizes,
            ) -> None:
                running.reshape(fr.World(0, sizes[0]))
                sizes.reverse()
                next(batches)
                running.rollback()

            def make_and_take(running: Any = running, make: Any = make) -> None:
                with make() as loader:
                    loader.load_state_dict(running.state_dict())
                    loader.reshape(fr.World(0, 2))
                    next(iter(loader))

            title = "next batch on other ranks" + (f", where='{where}'" if where else "")
            yield compare(
                title, {"a new loader": make_and_take, "reshape": reshape_and_take}, effort
            )
            running.close()


if __name__ == "__main__":
    sys.exit(main(None, "reshape", measure_reshape))
