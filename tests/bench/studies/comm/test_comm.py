"""Bandwidths as nccl-tests defines them, the cluster file that comes of them, and ranks of this host."""

from __future__ import annotations

import msgspec
import pytest

from fuelrail.__main__ import main
from fuelrail.bench.measure.machine import Gpu, machine_facts
from fuelrail.bench.planner.hardware import load_cluster
from fuelrail.bench.studies.comm import run
from fuelrail.bench.studies.comm.report import (
    CommOptions,
    CommReport,
    link_of,
    timed,
)
from fuelrail.bench.studies.comm.run import run_comm, with_link
from fuelrail.pipeline.errors import ConfigError, FuelrailError


def report(nodes, *timings):
    return CommReport(
        schema="fuelrail-bench-comm",
        version=1,
        created="2026-01-01T00:00:00+00:00",
        machine=machine_facts(),
        backend="nccl",
        device="H100",
        nodes=nodes,
        ranks=16,
        options=CommOptions(),
        timed=list(timings),
        warnings=[],
    )


def test_bus_bandwidths_are_nccl_tests():
    # doc/PERFORMANCE.md: all-reduce 2 (n - 1) / n, all-gather and reduce-scatter (n - 1) / n, send/receive 1.
    timings = {
        kind: timed(kind, axis="tp", ranks=4, num_bytes=10**9, seconds=0.5)
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
    }
    assert {timing.algorithm_gb_per_s for timing in timings.values()} == {2.0}
    assert [timing.bus_gb_per_s for timing in timings.values()] == [
        3.0,
        1.5,
        1.5,
    ]
    assert timed("send_recv", axis="pp", ranks=4, num_bytes=10**9, seconds=0.5).bus_gb_per_s == 2.0


def test_the_link_is_the_largest_groups_all_reduce():
    small = timed("all_reduce", axis="all", ranks=16, num_bytes=1024, seconds=2e-5)
    large = timed("all_reduce", axis="all", ranks=16, num_bytes=10**9, seconds=0.01)
    inner = timed("all_reduce", axis="tp", ranks=2, num_bytes=10**9, seconds=0.001)
    rate, latency = link_of([inner, large, small])
    assert (rate, latency) == (
        pytest.approx(2 * 15 / 16 * 100),
        pytest.approx(20),
    )
    base = load_cluster("8x8-h100")
    inside = with_link(base, report(1, large, small))
    assert inside.inside.gb_per_s.value == pytest.approx(187.5)
    assert inside.between == base.between
    # Of two nodes with eight ranks each, a device's share of the ports.
    between = with_link(base, report(2, large, small))
    assert between.between.gb_per_s.value == pytest.approx(187.5 / 8)
    assert "`fuelrail bench comm`, 2026-01-01" in between.between.latency_us.source


@pytest.mark.process
@pytest.mark.usefixtures("warm_ranks")
def test_two_ranks_of_this_host(tmp_path, capsys):
    out = tmp_path / "comm"
    sizes = [
        "--smallest",
        "1000",
        "--largest",
        "100000",
        "--repeats",
        "2",
        "--warmup",
        "0",
    ]
    assert (
        main(
            [
                "bench",
                "comm",
                *sizes,
                "--mesh",
                "dp_shard=2",
                "--out",
                str(out),
                "--json",
            ]
        )
        == 0
    )
    printed = msgspec.json.decode(capsys.readouterr().out, type=CommReport)
    assert printed == msgspec.json.decode((out / "report.json").read_bytes(), type=CommReport)
    assert {timing.axis for timing in printed.timed} == {"dp_shard"}
    assert sorted({timing.num_bytes for timing in printed.timed}) == [
        1000,
        8000,
        64000,
        100_000,
    ]
    assert all(timing.microseconds > 0 for timing in printed.timed)
    assert (printed.backend, printed.nodes, printed.warnings) == ("gloo", 1, [])
    assert (out / "report.md").read_text().count("all_reduce") == 4
    page = (out / "report.html").read_text()
    sizes_part, facts = page.split("Machine, dataset, options")
    assert sizes_part.count("<tr>") == 17, "a row for each size"
    assert "smallest=1000" in facts


@pytest.mark.parametrize(
    ("disturbed", "written"),
    [(None, True), ("other processes used 1.5 of 2 CPUs", False)],
)
def test_a_cluster_file_is_written_on_an_idle_host_alone(disturbed, written, tmp_path, monkeypatch):
    comm_report = report(
        1,
        timed("all_reduce", axis="all", ranks=16, num_bytes=1024, seconds=2e-5),
        timed("all_reduce", axis="all", ranks=16, num_bytes=10**9, seconds=0.01),
    )
    monkeypatch.setattr(
        run,
        "measure_on_this_host",
        lambda _: msgspec.structs.replace(comm_report, disturbed=disturbed),
    )
    monkeypatch.setattr(
        run,
        "installed_gpus",
        lambda: [Gpu(name="H100", memory_bytes=1, driver="1")],
    )
    options = CommOptions(base="1x8-h100")
    if written:
        run_comm(options, tmp_path, html=False)
        cluster = load_cluster(str(tmp_path / "cluster.yaml"))
        assert cluster.inside.gb_per_s.value == pytest.approx(link_of(comm_report.timed)[0])
        assert cluster.device == load_cluster("1x8-h100").device
    else:
        with pytest.raises(
            FuelrailError,
            match=r"cluster.yaml is not written: other processes used 1.5 of 2 CPUs",
        ):
            run_comm(options, tmp_path, html=False)
        assert "loaded host" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "cluster.yaml").exists() is written


@pytest.mark.parametrize(("backend", "gpus"), [("gloo", 1), ("auto", 0)])
def test_rates_of_gloo_on_a_cpu_are_kept_out_of_a_clusters_file(
    backend, gpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        run,
        "installed_gpus",
        lambda: [Gpu(name="H100", memory_bytes=1, driver="1")] * gpus,
    )
    with pytest.raises(ConfigError, match="by gloo on the CPU"):
        run_comm(CommOptions(base="1x8-h100", backend=backend), tmp_path)


def test_what_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="ranks=1: a collective needs 2"):
        run_comm(CommOptions(ranks=1), tmp_path)
    with pytest.raises(ConfigError, match="smallest=8 is more than largest=4"):
        run_comm(CommOptions(smallest=8, largest=4), tmp_path)
    with pytest.raises(ConfigError, match="mesh 'tp=4' is for 4 ranks, the run has 2"):
        run_comm(CommOptions(mesh="tp=4"), tmp_path)


@pytest.mark.process
def test_gloo_on_a_machine_with_gpus_is_warned_of(tmp_path, monkeypatch):
    """Run in this process, as the only rank of torchrun; the GPU is claimed, for gloo asks nothing of it."""
    import torch

    from fuelrail.bench.studies.comm import measure

    monkeypatch.setattr(measure, "KINDS", ("all_reduce",))  # a rank alone has nobody to send to
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    options = CommOptions(backend="gloo", smallest=64, largest=64, repeats=1)
    comm_report = measure.measure(options)
    assert "Use --backend nccl" in comm_report.warnings[0]
