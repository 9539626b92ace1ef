"""What `describe` says about a batch is so, for every kind of batch; and the table of the records on its way."""

from __future__ import annotations

import re
from typing import get_type_hints

import pytest
import torch

from fuelrail import DataLoader, World
from fuelrail.__main__ import main
from fuelrail.loaders import records
from fuelrail.loaders.records import Batch
from fuelrail.pipeline.errors import ConfigError

IMAGE = {"height": 32, "width": 64}
CASES = [
    {"transforms": {"image": IMAGE, "points": True}},
    {
        "transforms": {"image": IMAGE, "points": True, "box_frame": "lidar"},
        "window": {"frames": [-1, 0]},
    },
    {
        "transforms": {"image": IMAGE, "static": True},
        "order": {"kind": "lanes"},
    },
    {
        "transforms": {"image": IMAGE, "two_views": True},
        "mix": {"a": 1, "b": 1},
    },
]


@pytest.fixture(scope="module")
def roots(build_once):
    return {name: build_once({"train": (4, 4)}, seed=ord(name))[0] for name in ("a", "b")}


@pytest.mark.parametrize("case", CASES)
def test_every_entry_is_known_and_is_what_the_next_batch_holds(roots, case):
    dataset = roots if "mix" in case else roots["a"]
    hints = get_type_hints(Batch)
    with DataLoader(dataset, 2, num_workers=1, world=World(), **case) as loader:
        described = {name: (form, meaning) for name, form, meaning in loader.describe().entries}
        batch = next(iter(loader))
    assert described.keys() == batch.keys()
    for name, value in batch.items():
        form, meaning = described[name]
        assert meaning, name
        if isinstance(value, torch.Tensor):
            assert form == f"{str(value.dtype)[6:]} {list(value.shape)}"
        elif isinstance(value, list):
            assert form.startswith(f"list of {len(value)} ")
        kind = hints[name]
        if "static" not in case["transforms"]:  # which makes tensors of lists
            assert isinstance(value, getattr(kind, "__origin__", kind)), name
    frame = case["transforms"].get("box_frame", "ego")
    assert described["gt_boxes_3d"][1].endswith(f"in the {frame} frame")


def test_lengths_that_differ_are_stars(roots):
    with DataLoader(
        roots["a"],
        4,
        shuffle=False,
        transforms={"image": IMAGE, "points": True},
        num_workers=1,
    ) as loader:
        text = str(loader.describe())
    assert re.search(r"^points +list of 4 float32 \[\*, 5\] +first lidar", text, re.MULTILINE)


def test_the_position_stays_and_a_running_iteration_too(roots):
    with DataLoader(roots["a"], 2, transforms={"image": IMAGE}, num_workers=1) as loader:
        batches = iter(loader)
        first = next(batches)
        state = loader.state_dict()
        described = loader.describe()
        assert loader.state_dict() == state
        rest = list(batches)
        assert repr(described) == str(described)
        long = (
            *described.entries,
            ("boxes", "dict of " + "x" * 99, "what it is"),
        )
        assert max(map(len, str(described._replace(entries=long)).splitlines()[:-1])) < 160
        assert "<td>img</td><td>uint8 [2, 2, 3, 32, 64]</td>" in described._repr_html_()
        assert len(rest) == 3 and first["step"] == 0 and rest[0]["step"] == 1


def test_what_is_not_a_dict_is_refused(roots):
    with (
        DataLoader(
            roots["a"],
            2,
            transforms={"image": IMAGE},
            num_workers=1,
            collate_fn=tuple,
        ) as loader,
        pytest.raises(ConfigError, match="must be a dict, and it is tuple"),
    ):
        loader.describe()


def test_inspect_shows_a_batch(roots, capsys):
    assert main(["inspect", str(roots["a"]), "--batch"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^img +uint8 \[2, 2, 3, 64, 96\] +RGB;", out, re.MULTILINE)


def test_the_table_names_the_records_in_the_order_of_the_module() -> None:
    rows = re.findall(
        r"^(\w+) +(\S.*?)  +`?(\w+)`?  +(\S.*)$",
        records.__doc__ or "",
        re.MULTILINE,
    )[1:]
    assert [stage for stage, *_ in rows] == [
        "schedule",
        "prefetch",
        "slot",
        "fetch",
        "parse",
        "decode",
        "collate",
        "transfer",
    ]
    record_names = [makes for _, _, makes, _ in rows[:-2]]
    assert [takes.strip("`") for _, takes, _, _ in rows[1:-2]] == record_names[:-1]
    defined = [
        name
        for name, kind in vars(records).items()
        if isinstance(kind, type) and hasattr(kind, "_fields")
    ]
    assert [name for name in defined if name in record_names] == list(dict.fromkeys(record_names))
    assert all(getattr(records, name).__doc__ for name in defined)
