"""`fuelrail top`: figures from two readings, what is drawn, what is said when nobody answers."""

from __future__ import annotations

import io
import itertools
import threading
from typing import NamedTuple

import pytest
from rich.console import Console

from fuelrail.__main__ import main
from fuelrail.loaders.storage.protocol import StorageStats
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime import top
from fuelrail.pipeline.runtime.metrics import MetricsServer, loader_metrics
from fuelrail.pipeline.runtime.stages import StageClock


class Stats(NamedTuple):
    stages: tuple
    batches: int
    samples: int
    images: int
    waited_s: float
    elapsed_s: float
    storage: StorageStats = StorageStats("pread")
    bad_samples: int = 0


def make_metrics(second, waiting):
    """A loader that did 5 batches of 4 samples a second; decoding is busy, collating starved."""
    stages = (
        StageClock(
            name="decode",
            num_threads=2,
            items=20 * second,
            busy_s=1.9 * second,
            starved_s=0.1 * second,
            blocked_s=0.0,
            waiting=6,
            capacity=8,
        ),
        StageClock(
            name="collate",
            num_threads=1,
            items=5 * second,
            busy_s=0.1 * second,
            starved_s=0.9 * second,
            blocked_s=0.0,
            waiting=0,
            capacity=2,
        ),
    )
    return loader_metrics(
        Stats(
            stages=stages,
            batches=5 * second,
            samples=20 * second,
            images=120 * second,
            waited_s=waiting * second,
            elapsed_s=second,
        ),
        {"rank": "2"},
    )


def view(waiting):
    return top.compare(
        top.digest(make_metrics(3, waiting), 100.0),
        top.digest(make_metrics(5, waiting), 102.0),
    )


def test_rates_and_shares_are_those_of_the_interval():
    figures = view(0.4)
    assert (
        figures.rank,
        figures.batches_per_s,
        figures.samples_per_s,
        figures.images_per_s,
    ) == (
        "2",
        5,
        20,
        120,
    )
    assert figures.waiting == pytest.approx(0.4)
    assert figures.stages[0] == (
        "decode",
        2,
        20,
        pytest.approx(0.95),
        pytest.approx(0.05),
        0,
        6,
        8,
    )
    assert figures.bottleneck == "decode"
    assert view(0.01).bottleneck is None, "a trainer that is fed is not held up"


def test_a_loader_that_began_again_does_not_count_backwards():
    figures = top.compare(
        top.digest(make_metrics(5, 0.1), 100.0),
        top.digest(make_metrics(1, 0.1), 101.0),
    )
    assert figures.batches_per_s == 0
    assert all(row.items_per_s == 0 for row in figures.stages)


def test_what_is_drawn():
    console = Console(file=io.StringIO(), width=120)
    console.print(top.draw([view(0.4), view(0.0)]))
    text = console.file.getvalue()
    assert (
        "rank 2   5.0 batches/s   20.0 samples/s   120 images/s   trainer fed 60 %   held up by decode"
        in text
    )
    assert "trainer fed 100 %\n" in text
    assert "########.. 6/8" in text


@pytest.mark.costly
def test_the_command_reads_a_real_endpoint(capsys):
    seconds = itertools.count(1)
    with MetricsServer(lambda: make_metrics(next(seconds), 0.2), port=0) as server:
        address = server.url.removeprefix("http://").removesuffix("/metrics")
        assert main(["top", address, "--once", "--interval", "0.05"]) == 0
    assert "rank 2" in capsys.readouterr().out


@pytest.mark.costly
def test_the_function_returns_what_the_command_shows():
    seconds = itertools.count(1)
    reports = []
    with MetricsServer(lambda: make_metrics(next(seconds), 0.2), port=0) as server:
        (figures,) = top.top(server.url, once=True, interval=0.05, progress=reports.append)
    assert reports == [[figures]]
    assert (figures.rank, figures.bottleneck) == ("2", "decode")


def test_it_ends_with_the_trainer():
    console = Console(file=io.StringIO(), width=120)
    drawn = []

    def collect():
        drawn.append(1)
        if len(drawn) == 3:
            # From another thread than the server's own, which is the one that answers here.
            threading.Thread(target=server.close).start()
        return make_metrics(len(drawn), 0.2)

    server = MetricsServer(collect, port=0)
    top.show([server.url], top.TopOptions(interval=0.05), console)
    said = console.file.getvalue()
    assert "the trainer has ended" in said
    # No terminal: one interval after another, as a pipe is read.
    assert said.count("rank 2") == said.count("decode") // 2 > 0
    assert said.index("rank 2") < said.index("the trainer has ended")
    with pytest.raises(ConfigError, match="no metrics at"):
        top.top(server.url, interval=0.05)


@pytest.mark.parametrize(
    ("address", "said"),
    [("127.0.0.1:1", "is the trainer running"), ("file:///etc/x", "http URL")],
)
def test_nobody_there(address, said, capsys):
    assert main(["top", address]) == 2
    assert said in capsys.readouterr().err


def test_an_interval_out_of_range(capsys):
    assert main(["top", "x:1", "--interval", "0"]) == 2
    assert "--interval 0" in capsys.readouterr().err
