from __future__ import annotations

import pytest

from fuelrail.__main__ import main
from fuelrail.bench.studies.diff import load_comparable

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm_ranks")]

_PROFILE = """
name: quick
device: none
network: none
per: sample
reference_input: {cameras: 2, height: 256, width: 704}
forward_ms: 8.0
backward_ms: 16.0
optimiser_ms: 0.5
sources: [made up]
derivation: made up
"""


def bench(dataset, out, *options):
    return main(["bench", "scale", str(dataset), "--out", str(out), *map(str, options)])


def test_one_and_two_ranks_are_measured(dataset, tmp_path, capsys):
    (tmp_path / "quick.yaml").write_text(_PROFILE)
    out = tmp_path / "out"
    options = ("--ranks", 1, 2, "--steps", 14, "--warmup", 4, "--batch-size", 1)
    assert (
        bench(
            dataset,
            out,
            *options,
            "--accelerator",
            f"emulated:{tmp_path / 'quick.yaml'}",
        )
        == 0
    )
    report = load_comparable(out / "report.json")
    points = [
        (run.num_ranks, run.batch_size, run.weak is not None, run.strong is not None)
        for run in report.measured
    ]
    assert points == [(1, 1, True, False), (1, 2, False, True), (2, 1, True, True)]
    assert all(run.step_ms.low <= run.step_ms.median <= run.step_ms.high for run in report.measured)
    assert "efficiency" in capsys.readouterr().out
    assert str(dataset) not in (out / "report.json").read_text()
    assert {"report.html", "report.md"} <= {path.name for path in out.iterdir()}
