"""The protocol of ranks that die, join and lag, checked in all its states by Spin; and models that are wrong, found."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from support.ranks import TESTS

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(0)]

MODEL = TESTS / "support" / "reshape_protocol.pml"
MISTAKES = {
    "NO_RESHAPE": "rows",  # a batch of the old share
    "NO_STATE": "next",  # a rank that lags is not told
    "NO_ROLLBACK": "next",  # a step that failed is not given again
    "EARLY_COMMIT": "rows",  # a step counts before all have taken it
}
BOUNDS = [
    ("RANKS=1",),
    ("RANKS=2",),
    ("RANKS=3",),
    ("RANKS=4", "SLOTS=1"),
    ("RANKS=4", "SLOTS=2", "STEPS=1"),
]
"""Four ranks with any rounds at once have more states than memory holds."""


def check(folder, *definitions):
    """What Spin says of the model with these definitions."""
    spin = shutil.which("spin")
    if spin is None:
        pytest.skip("apt-get install spin checks the model")
    names = [f"-D{definition}" for definition in definitions]
    subprocess.run([spin, *names, "-a", MODEL], cwd=folder, check=True, capture_output=True)
    compiled = ["gcc", "-O2", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=8000", "-o", "pan", "pan.c"]
    subprocess.run(compiled, cwd=folder, check=True)
    command = [folder / "pan", "-m40000000"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


@pytest.mark.parametrize("bounds", BOUNDS, ids=" ".join)
def test_committed_steps_are_whole_and_each_applied_once(tmp_path, bounds):
    said = check(tmp_path, *bounds)
    assert "errors: 0" in said, said
    assert "max search depth too small" not in said, "the search is not exhaustive"
    assert "out of memory" not in said and "reached" in said
    print(*re.findall(r"\d+ states, stored", said))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_model_without_a_part_of_the_protocol_fails(tmp_path, mistake):
    said = check(tmp_path, "RANKS=3", "SLOTS=2", mistake)
    assert re.search(rf"assertion violated .*{MISTAKES[mistake]}", said), said
