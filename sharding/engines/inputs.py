"""What every task of a run reads, on whichever machine it runs: scan table and plan.

A run in a folder that all nodes share has them there. For a URL they are put under ``OUT/.fuelrail/inputs/``, and each
node fetches them once. A number drawn for the run tells whether a node sees the files of this run at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fuelrail.pipeline.errors import ConfigError, DatasetError
from fuelrail.pipeline.manifest import WORK_FOLDER
from fuelrail.pipeline.remote import default_cache_folder, is_url
from fuelrail.sharding.output import open_output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fuelrail.sharding.writer import WriteJob

_INPUTS: Final = f"{WORK_FOLDER}/inputs"
_RUN: Final = "run"
_FIELDS: Final = ("scan_table", "plan_rows", "selection")


def share_inputs(job: WriteJob, run: str) -> None:
    """Make a run's inputs reachable for its tasks elsewhere; ``run`` is the number drawn for it."""
    out = open_output(job.out)
    (job.scan_table.parent / _RUN).write_text(run)
    if is_url(job.out):
        with out.writing():
            for name in _FIELDS:
                file: Path = getattr(job, name)
                with file.open("rb") as source, out.publish(f"{_INPUTS}/{file.name}") as target:
                    shutil.copyfileobj(source, target, 8 << 20)


def inputs_here(job: WriteJob, run: str, node: str) -> WriteJob:
    """The job with paths that are good on this node, fetched where they must be.

    Raises DatasetError or ConfigError naming the node that does not see output or source.
    """
    if not is_url(job.source.location) and not all(Path(place).exists() for place in job.source.location.split("\n")):
        raise ConfigError(
            f"node {node} does not see the source '{job.source.location}': it must lie on a file system that all nodes "
            "share, at the same path, or at a URL"
        )
    with contextlib.suppress(OSError):
        if (job.scan_table.parent / _RUN).read_text() == run:
            return job
    if not is_url(job.out):
        raise DatasetError(
            f"node {node} does not see the output folder '{job.out}' as the machine that runs the command does: it "
            "must lie on a file system that all nodes share, at the same path, or at a URL such as s3://bucket/prefix"
        )
    folder = _node_folder(job.out) / run
    with _locked(folder.parent / "lock"):
        if not folder.exists():
            for other in folder.parent.iterdir():
                if other.is_dir():
                    shutil.rmtree(other, ignore_errors=True)  # of a run that was killed
            _fetch(job, folder)
    return dataclasses.replace(job, **{name: folder / getattr(job, name).name for name in _FIELDS})


def forget_inputs(location: str) -> None:
    """Remove from this node what was fetched for a run's tasks."""
    shutil.rmtree(_node_folder(location), ignore_errors=True)


def _node_folder(location: str) -> Path:
    name = f"{hashlib.sha256(location.encode()).hexdigest()[:16]}-node"
    folder = default_cache_folder() / "sharding" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fetch(job: WriteJob, folder: Path) -> None:
    from fuelrail.sharding.url_output import UrlOutput

    out = UrlOutput(job.out)
    half = folder.with_name(f"{folder.name}.half")
    half.mkdir()
    for name in _FIELDS:
        file: Path = getattr(job, name)
        out.fetch(f"{_INPUTS}/{file.name}", half / file.name)
    half.rename(folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
