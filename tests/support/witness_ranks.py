"""One rank under the witness, over gloo; see `test_witness`. Arguments: CASE FOLDER."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import fuelrail as fr

SIZE = 61
BATCH = 4
STEPS = 3


class Rows(Dataset):
    """Rows with their numbers."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, row: int) -> dict[str, object]:
        return {"index": row, "name": f"clip-{row:03d}"}


def loader(rank: int, ranks: int, workers: int = 0, **options: object) -> DataLoader:
    sampler = DistributedSampler(Rows(), ranks, rank, seed=3)
    return DataLoader(
        Rows(),
        BATCH,
        sampler=sampler,
        num_workers=workers,
        multiprocessing_context=None,
        **options,
    )


def watch(case: str, folder: Path, rank: int, ranks: int) -> list:
    """Return the reports of a case."""
    if case == "clean":
        watched = fr.witness(
            loader(rank, ranks, workers=1),
            on_fault="raise",
            folder=folder / "a",
        )
        named = fr.witness(loader(rank, ranks, drop_last=True), key=lambda batch: batch["name"])
        for epoch in range(2):
            for each in (watched, named):
                each.set_epoch(epoch)
                for batch in each:
                    assert len(batch["index"]) <= BATCH
        return [*watched.reports, *named.reports]
    if case == "not shared":
        watched = fr.witness(DataLoader(Rows(), BATCH), on_fault="ignore")
    elif case == "one row lost":
        batches = list(loader(rank, ranks))
        batches[2]["index"][1] = batches[2]["index"][0] if rank == 1 else batches[2]["index"][1]
        watched = fr.witness(batches, expected=SIZE, on_fault="ignore")
    elif case == "raised on all":
        watched = fr.witness(
            Subset(Rows(), range(rank, SIZE - 5, ranks)),
            expected=SIZE,
            on_fault="raise",
        )
        try:
            list(watched)
        except fr.errors.WitnessError as error:
            assert "5 rows" in str(error)
            return watched.reports
        raise AssertionError("no error")
    elif case == "save":
        watched = fr.witness(loader(rank, ranks), on_fault="raise")
        list(itertools.islice(watched, STEPS))
        state = watched.state_dict(gather=True)
        if rank == 0:
            (folder / "state.json").write_text(json.dumps(state))
        assert watched.check().faults == []
        return []
    elif case == "resume":
        order = list(DistributedSampler(Rows(), 1, 0, seed=3))
        state = json.loads((folder / "state.json").read_text())
        seen = STEPS * BATCH * state["world"]
        rest = (order * 2)[seen : seen + -(-(SIZE - seen) // ranks) * ranks][rank::ranks]
        batches = [{"index": rest[at : at + BATCH]} for at in range(0, len(rest), BATCH)]
        reports = []
        for skipped in (0, 1):
            part = batches[skipped:]
            watched = fr.witness(part, expected=SIZE, tail="pad", on_fault="ignore")
            watched.load_state_dict(state)
            list(watched)
            reports += watched.reports
        return reports
    elif case == "dead":
        watched = fr.witness(loader(rank, ranks), timeout_s=5)
        if rank == 1:
            while not (folder / "told.0").exists():  # neither here nor gone
                time.sleep(0.05)
            return []
        try:
            list(watched)
        except fr.errors.WitnessError as error:
            assert "another rank did not come" in str(error)
            (folder / f"told.{rank}").touch()
            sys.stdout.flush()
            os._exit(0)
        raise AssertionError("no error")
    list(watched)
    return watched.reports


def main(case: str, folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    reports = watch(case, folder, rank, dist.get_world_size())
    texts = [None] * dist.get_world_size()
    if case == "dead":
        os._exit(0)
    dist.all_gather_object(texts, [report.as_json() for report in reports])
    if rank == 0:
        assert all(text == texts[0] for text in texts), "ranks differ in what they say"
        (folder / f"{case}.json").write_text(f"[{','.join(texts[0])}]")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
