"""What a checkpoint's weights have seen as an in-toto statement, for programs that sign.

The format is that of https://github.com/in-toto/attestation (Statement, version 1).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Final

import msgspec

from fuelrail.bench.studies.runs.history import RunHistory
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.storage.files import open_regular

PREDICATE: Final = "urn:fuelrail:ledger:1"


def attest(
    ledger: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    place: tuple[int, int],
) -> dict[str, Any]:
    """Return a statement of what the weights of a checkpoint have seen, as plain JSON types.

    Args:
        ledger: the run's ledger.
        checkpoint: file or folder of the checkpoint; the statement has the SHA-256 of its files.
        place: epoch and samples consumed of the loader's state in the checkpoint.

    Raises LedgerError; ConfigError for a place that the run did not come to, and for files that
    cannot be read.
    """
    history = RunHistory(ledger)
    report = history.report()
    parts = [item for item in report.stretches if item.start < place]
    length = history.parts[-1].walk.batching.of_epoch(place[0]).epoch_length
    if not parts or place > report.stretches[-1].end or not 0 <= place[1] <= length:
        raise ConfigError(
            f"place={place} is not in ledger '{ledger}', which has epochs of {length} "
            f"and comes to {report.stretches[-1].end}"
        )
    parts[-1] = msgspec.structs.replace(parts[-1], end=min(parts[-1].end, place), steps_again=0)
    try:
        root = Path(checkpoint)
        files = [] if root.is_dir() else [root]
        for path in sorted(root.rglob("*")) if root.is_dir() else ():
            # A link is another name of what it leads to, in the checkpoint's folder; elsewhere it
            # may change behind the statement.
            if path.is_symlink() and not (
                path.exists() and path.resolve().is_relative_to(root.resolve())
            ):
                raise ConfigError(
                    f"'{path}' is a link that leads out of the checkpoint's folder, or nowhere; "
                    "put the file itself there"
                )
            if path.is_dir():
                continue
            if not path.is_file():
                raise ConfigError(
                    f"'{path}' is not a regular file; a checkpoint has files and folders"
                )
            files.append(path)
        subjects = []
        for file in files:
            with open_regular(file) as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            subjects.append(
                {
                    "name": str(file.relative_to(root.parent)),
                    "digest": {"sha256": digest},
                }
            )
    except OSError as error:
        raise ConfigError(f"'{error.filename}' cannot be read: {error.strerror}") from error
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": PREDICATE,
        "predicate": {
            "head": report.head,
            "place": place,
            "stretches": parts,
            "setups": [part.stretch.setup for part in history.parts[: len(parts)]],
        },
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(statement))
    return plain
