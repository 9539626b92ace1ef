from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path

import msgspec
import pytest

from fuelrail.bench.measure import machine
from fuelrail.bench.measure.machine import installed_gpus, machine_facts
from fuelrail.pipeline.runtime.host import usable_cpus


def test_facts_are_there_and_name_no_place_and_no_person():
    facts = machine_facts()
    assert 0 < facts.num_cpus <= facts.num_cpus_installed
    assert facts.memory_bytes > 2**20
    assert "torch" in facts.packages
    text = msgspec.json.encode(facts).decode()
    assert str(Path.home()) not in text
    assert str(Path(machine.__file__).resolve().parents[3]) not in text
    for name in (socket.gethostname(), getpass.getuser()):
        assert f'"{name}"' not in text


def test_usable_cpus_stay_within_the_affinity_mask():
    assert usable_cpus() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("script", "gpus"),
    [
        (
            'echo "NVIDIA H200, 143771, 570.1"\necho "odd line"',
            [("NVIDIA H200", 143771 * 2**20, "570.1")],
        ),
        ("echo 'NVIDIA-SMI has failed'\nexit 9", []),
    ],
)
def test_gpus_are_read_from_the_drivers_tool(script, gpus, tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert [(gpu.name, gpu.memory_bytes, gpu.driver) for gpu in installed_gpus()] == gpus
