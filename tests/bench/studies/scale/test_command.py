from __future__ import annotations

import pytest

from fuelrail.__main__ import main
from fuelrail.bench.measure.machine import CpuUse
from fuelrail.bench.studies.diff import load_comparable
from fuelrail.bench.studies.scale import report as report_module
from fuelrail.bench.studies.scale import run as run_module

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


def test_one_and_two_ranks_are_measured_and_more_simulated(dataset, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        CpuUse, "disturbed", None
    )  # other tests run beside this one, and hurt the simulation too
    monkeypatch.setattr(report_module, "_MAX_ERROR", 100.0)
    monkeypatch.setattr(run_module, "_LOADER_SECONDS", 1.5)
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
            "--max-ranks",
            8,
        )
        == 0
    )
    report = load_comparable(out / "report.json")
    assert [(run.num_ranks, run.batch_size, list(run.efficiency)) for run in report.measured] == [
        (1, 1, ["weak"]),
        (1, 2, ["strong"]),
        (2, 1, ["weak", "strong"]),
    ]
    assert all(run.step_ms.low <= run.step_ms.median <= run.step_ms.high for run in report.measured)
    assert all(run.simulated_ms > 0 for run in report.measured)
    assert {curve.points[-1].num_ranks for curve in report.curves} == {8}
    assert "efficiency" in capsys.readouterr().out
    assert str(dataset) not in (out / "report.json").read_text()
    assert {"report.html", "report.md"} <= {path.name for path in out.iterdir()}
