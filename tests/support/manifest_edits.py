"""Changes of a manifest's tables in JSON lines, and their scan."""

from __future__ import annotations

import json

from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec

OPTIONS = {
    "boxes_in": "global",
    "lidar_columns": ["x", "y", "z", "intensity", "ring"],
}


def scan(root, **options):
    return scan_source(SourceSpec("manifest", str(root), {**OPTIONS, **options}))


def edit(root, change, stem="frames"):
    file = root / f"{stem}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = change(rows) or rows
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def put(number, **values):
    def change(rows):
        rows[number].update({name.replace("__", "."): value for name, value in values.items()})

    return change


def without(*names):
    def change(rows):
        return [{name: value for name, value in row.items() if name not in names} for row in rows]

    return change
