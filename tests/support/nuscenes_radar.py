"""Radar files in nuScenes' layout for the dataroots of :mod:`support.nuscenes_tables`, linked in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from support.nuscenes_tables import Dataroot

ROW = np.dtype(
    [
        ("x", "<f4"),
        ("y", "<f4"),
        ("z", "<f4"),
        ("dyn_prop", "i1"),
        ("id", "<i2"),
        ("rcs", "<f4"),
        ("vx", "<f4"),
        ("vy", "<f4"),
        ("vx_comp", "<f4"),
        ("vy_comp", "<f4"),
        ("is_quality_valid", "i1"),
        ("ambig_state", "i1"),
        ("x_rms", "i1"),
        ("y_rms", "i1"),
        ("invalid_state", "i1"),
        ("pdh0", "i1"),
        ("vx_rms", "i1"),
        ("vy_rms", "i1"),
    ]
)
LETTERS = {"f": "F", "i": "I"}


def pcd(rows: np.ndarray, **header: str) -> bytes:
    """A file of these rows; ``header`` replaces lines."""
    kinds = [ROW[name] for name in ROW.names]
    lines = {
        "VERSION": "0.7",
        "FIELDS": " ".join(ROW.names),
        "SIZE": " ".join(str(kind.itemsize) for kind in kinds),
        "TYPE": " ".join(LETTERS[kind.kind] for kind in kinds),
        "COUNT": " ".join("1" for _ in kinds),
        "WIDTH": str(len(rows)),
        "HEIGHT": "1",
        "VIEWPOINT": "0 0 0 1 0 0 0",
        "POINTS": str(len(rows)),
        "DATA": "binary",
    } | header
    text = "# .PCD v0.7 - Point Cloud Data file format\n" + "".join(
        f"{key} {value}\n" for key, value in lines.items()
    )
    return text.encode() + rows.tobytes() + b"\n"  # nuScenes' files end so


def radar_rows(rng: np.random.Generator, number: int) -> np.ndarray:
    """Some returns; states are of all kinds, so that filters would take some away."""
    rows = np.zeros(number, ROW)
    for name in ROW.names:
        kind = ROW[name].kind
        rows[name] = rng.normal(0, 20, number) if kind == "f" else rng.integers(0, 5, number)
    return rows


def add_radar_files(dataroot: Dataroot, seed: int = 0) -> dict[str, np.ndarray]:
    """Write every file of the table's radars, and link their rows in time; returns the rows by file name."""
    rng = np.random.default_rng(seed)
    rows = [row for row in dataroot.tables["sample_data"] if "/RADAR" in row["filename"]]
    written = {}
    last: dict[tuple[str, str], dict] = {}
    scene = {row["token"]: row["scene_token"] for row in dataroot.tables["sample"]}
    for row in sorted(rows, key=lambda row: row["timestamp"]):
        series = (row["calibrated_sensor_token"], scene[row["sample_token"]])
        if series in last:
            row["prev"], last[series]["next"] = (
                last[series]["token"],
                row["token"],
            )
        last[series] = row
        written[row["filename"]] = radar_rows(rng, int(rng.integers(3, 20)))
        path = dataroot.root / row["filename"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pcd(written[row["filename"]]))
    dataroot.write("sample_data")
    return written
