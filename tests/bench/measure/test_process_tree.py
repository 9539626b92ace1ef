from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fuelrail.bench.measure.processes import tree_cpu_s, tree_memory_bytes

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]

_GRANDCHILD = """
x = bytearray(80 << 20)
x[::4096] = b"1" * len(x[::4096])
sum(range(4_000_000))
print("up", flush=True)
input()
"""
_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_GRANDCHILD!r}])"


def test_grandchildren_are_counted():
    cpu_s = tree_cpu_s(os.getpid())
    memory = tree_memory_bytes(os.getpid())
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "up\n"
        assert tree_memory_bytes(os.getpid()) > memory + (75 << 20)
        assert tree_cpu_s(os.getpid()) > cpu_s + 0.03
    finally:
        child.communicate("\n")


def test_a_process_that_is_gone_has_nothing():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert (tree_cpu_s(child.pid), tree_memory_bytes(child.pid)) == (0, 0)
