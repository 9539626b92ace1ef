"""What `shard`, `verify` and `synth` show of a long run where stderr is no terminal: a line each minute."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
from functools import partial

import pytest
from rich.console import Console

from fuelrail.pipeline.runtime.progress import Progress
from fuelrail.sharding import progress
from fuelrail.sharding.demo import synth as synth_module
from fuelrail.sharding.demo.synth import synth


class Stream(io.StringIO):
    """Reports when a line with some text was written to it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.has_text = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.text in self.getvalue():
            self.has_text.set()
        return count


@pytest.fixture
def stream(monkeypatch, request):
    """Stderr of a batch job, in which a minute takes 10 ms."""
    lines = Stream(request.param)
    make_progress = partial(Progress, console=Console(file=lines, width=200), every_s=0.01)
    monkeypatch.setattr(progress, "Progress", make_progress)
    return lines


@pytest.mark.process
def test_without_a_terminal_rich_is_not_imported():
    """Its import would be a twentieth of a scan of some hundred samples."""
    script = (
        "import sys; from fuelrail.sharding.progress import make_progress\n"
        "with make_progress(as_json=False) as lines: lines.show('scanned')\n"
        "print('rich' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout == "False\n", run.stderr


@pytest.mark.parametrize("stream", ["rendering captures: 2 of 3"], indirect=True)
def test_a_drive_that_is_rendered_has_its_lines(stream, tmp_path, monkeypatch) -> None:
    record = synth_module.record

    def record_slowly(world, root, capture):
        if capture.timestamp_us == slow:
            assert stream.has_text.wait(60)
        return record(world, root, capture)

    options = synth_module.SynthOptions(clips=1, frames=2, size=(64, 36), workers=1)
    captures = synth_module.captures(options, synth_module.make_clip(options, 0))
    slow = captures[2].timestamp_us
    monkeypatch.setattr(synth_module, "record", record_slowly)
    with progress.bar("rendering captures") as update:
        synth(
            tmp_path / "drive",
            options,
            progress=lambda done, total: update(completed=done, total=total),
        )
    assert re.search(r"^\d+ s: rendering captures: 2 of 3", stream.getvalue(), re.MULTILINE)


@pytest.mark.parametrize("stream", ["checked b: 2 of 3"], indirect=True)
def test_shards_that_are_checked_have_their_lines(stream) -> None:
    with progress.bar("checking") as update:
        for name in "ab":
            update(total=3, advance=1, description=f"checked {name}")
        assert stream.has_text.wait(60)


@pytest.mark.parametrize("stream", ["0/3 shards, making b"], indirect=True)
def test_a_run_of_shards_has_its_lines(stream) -> None:
    with progress.make_progress(as_json=False) as lines:
        lines.planned(30, ["b", "c", "d"], 300)
        lines.advanced(100)
        assert stream.has_text.wait(60)
