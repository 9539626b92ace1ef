"""`fuelrail browse` in headless Chromium: from the page's load to the first sample on the screen,
out of a folder and from an S3 server on loopback that waits before each answer.

``python -m fuelrail.bench.micro.browse [--rows N ...] [--dir DIR] [--rounds N] [--out FILE]``. A
dataset is an index of N rows over a synthetic clip of 40 samples, whose keys repeat: six cameras of
1600x900, a lidar, boxes.
Before each round its tables leave the page cache; from S3 the cache of fetched files is new, too.
DIR keeps the datasets: 450 MB a million rows.

A sample is on the screen when the images of its cameras are decoded and its points have come. The
server has what a reader needs of S3, GET with ranges and HEAD: moto reads a whole object for each
range of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pyarrow as pa

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.chromium import Page, open_page
from fuelrail.bench.report.files import publish_json
from fuelrail.bench.report.page import markdown_table
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.index.samples import INDEX_FILE
from fuelrail.pipeline.format.index.tables import write_tables
from fuelrail.pipeline.format.manifest import MANIFEST_FILE, SplitEntry, encode_manifest
from fuelrail.sharding.api import shard
from fuelrail.sharding.demo.options import VERSION
from fuelrail.sharding.demo.synth import synth
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.write.publish import ROWS_PER_GROUP, write_attributes, write_index

if TYPE_CHECKING:
    from fuelrail.pipeline.format.index.row import IndexRow

LATENCY_S = 0.05
NUM_FRAMES = 40
HEADER = (
    "samples",
    "from",
    "open [s]",
    "first sample [s]",
    "list [s]",
    "time line [s]",
    "own memory [MB]",
    "requests, a step",
    "requests, a jump",
)
NUM_STEPS = 10
NUM_JUMPS = 5

# Milliseconds since the page's navigation began, in a script that runs before the page's own.
CLOCK = """
const isShown = () => {
  const images = [...document.querySelectorAll('#cameras img')];
  return images.length > 0 && images.every((image) => image.complete && image.naturalWidth)
    && performance.getEntriesByType('resource').some(({ name }) => name.includes('/points?'));
};
const look = async () => {
  const time = document.querySelector('#when')?.textContent;
  if (!window.lineMs && time) window.lineMs = performance.now();
  if (!window.listMs && document.querySelector('.tile')) window.listMs = performance.now();
  if (!window.sampleMs && isShown()) {
    const images = [...document.querySelectorAll('#cameras img')];
    await Promise.all(images.map((image) => image.decode()));
    requestAnimationFrame(() => { window.sampleMs ||= performance.now(); });
  }
  requestAnimationFrame(look);
};
look();
"""


class BrowseCase(msgspec.Struct, frozen=True, kw_only=True):
    """A dataset at a place; one entry of each list a round.

    ``open_s`` is from the command to its address; ``first_sample_s``, ``list_s`` and ``line_s``, of
    the clip's time line, are from the page's load. ``most_bytes`` is the most resident memory of
    the server, pages of the mapped index included, ``own_bytes`` what is left without these.
    ``requests_...`` are those to S3: until the first sample is shown, thumbnails included; for each
    of some steps through its clip; and for each jump to a sample of another part of the index,
    with the sample after it, which is fetched ahead.
    """

    place: Literal["folder", "s3"]
    num_rows: int
    index_bytes: int
    open_s: list[float]
    first_sample_s: list[float]
    list_s: list[float]
    line_s: list[float]
    own_bytes: list[int]
    most_bytes: list[int]
    requests_until_first_sample: list[int] = []
    requests_of_steps: list[float] = []
    requests_of_jumps: list[int] = []


class BrowseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """All cases, the machine, and its load before: processes that ran, on average of a minute."""

    benchmark: str
    machine: MachineFacts
    load: float
    latency_s: float
    cases: list[BrowseCase]


def make_dataset(folder: Path, num_rows: int) -> Path:
    """Make a dataset in a new folder, unless it is there: an index of this number of rows, by our
    own writers, over the samples of a synthetic clip.
    """
    out = folder / f"rows-{num_rows}"
    if (out / MANIFEST_FILE).exists():
        return out
    source = folder / "source"
    clip = folder / "clip"
    synth(source, clips=1, frames=NUM_FRAMES, seed=7)
    if not clip.exists():
        shard(f"nuscenes:{source}", clip, options={"version": VERSION}, progress=Quiet())
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    small = open_dataset(clip)
    (shard_entry,) = small.shards
    stored = []
    for number in range(NUM_FRAMES):
        row = small.index.row(number)
        stored.append(row._replace(members=tuple(row.members)))

    def rows() -> Iterator[IndexRow]:
        for number in range(num_rows):
            clip_number, frame = divmod(number, NUM_FRAMES)
            yield stored[frame]._replace(clip_id=f"clip-{clip_number:06d}")

    def attributes() -> Iterator[pa.Table]:
        num_copies = ROWS_PER_GROUP // NUM_FRAMES + 2
        table = pa.concat_tables([small.table] * num_copies)
        place = table.schema.get_field_index("clip_id")
        field = table.schema.field(place)
        for first in range(0, num_rows, ROWS_PER_GROUP):
            end = min(first + ROWS_PER_GROUP, num_rows)
            clip_ids = [f"clip-{number // NUM_FRAMES:06d}" for number in range(first, end)]
            part = table.slice(first % NUM_FRAMES, end - first)
            yield part.set_column(place, field, pa.array(clip_ids))

    write_index(out, small.index.names, small.index.codecs, rows())
    write_attributes(out, attributes())
    entry = shard_entry._replace(num_samples=num_rows)
    os.link(clip / entry.name, out / entry.name)
    num_clips = -(-num_rows // NUM_FRAMES)
    split = SplitEntry(
        first_sample=0,
        num_samples=num_rows,
        first_shard=0,
        num_shards=1,
        num_clips=num_clips,
    )
    files = write_tables(out, [entry])
    manifest = msgspec.structs.replace(
        small.manifest,
        num_samples=num_rows,
        num_clips=num_clips,
        files=tuple(files),
        splits={entry.split: split},
    )
    (out / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return out


class _Objects(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the files of a folder, each after the latency."""

    protocol_version = "HTTP/1.1"

    def __init__(self, folder: Path, requests: list[str], *args: Any) -> None:
        self._folder = folder
        self._requests = requests
        super().__init__(*args)

    def do_GET(self) -> None:
        """Send an object, or the range of it that is asked for."""
        time.sleep(LATENCY_S)
        header = self.headers.get("Range", "")
        self._requests.append(f"{self.command} {self.path} {header}")
        path, _, _ = self.path.partition("?")
        file = self._folder / Path(path).name
        if not file.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size = file.stat().st_size
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", header)
        first = 0
        end = size
        if span:
            first = int(span[1])
            if span[2]:
                end = min(int(span[2]) + 1, size)
        self.send_response(206 if span else 200)
        self.send_header("Content-Length", str(end - first))
        self.send_header("Content-Range", f"bytes {first}-{end - 1}/{size}")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command == "GET":
            with file.open("rb") as stream:
                stream.seek(first)
                self.wfile.write(stream.read(end - first))

    do_HEAD = do_GET  # noqa: N815 - the name that the base class looks for

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def serve_objects(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder as a bucket; yield its address, and the list that its requests go to."""
    requests: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Objects, folder, requests))
    port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{port}", requests
    finally:
        server.shutdown()
        server.server_close()


def measure_round(
    place: str,
    env: dict[str, str],
    requests: list[str],
    work: Path,
) -> dict[str, Any]:
    """Serve a dataset, look at it in a browser, and return this round's value of each list."""
    command = [sys.executable, "-m", "fuelrail", "browse", place]
    started = time.perf_counter()
    server = subprocess.Popen(
        command,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[0]
        open_s = time.perf_counter() - started
        with open_page("about:blank", work / "profile") as page:
            page.call("Page.addScriptToEvaluateOnNewDocument", source=CLOCK)
            requests.clear()
            page.call("Page.navigate", url=url)
            page.wait("window.sampleMs > 0")
            num_first = len(requests)
            page.wait("window.listMs > 0 && window.lineMs > 0")
            status = Path(f"/proc/{server.pid}/status").read_text(encoding="ascii")
            memory = dict(re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE))
            figures = {
                "open_s": round(open_s, 3),
                "first_sample_s": round(page.run("window.sampleMs") / 1e3, 3),
                "list_s": round(page.run("window.listMs") / 1e3, 3),
                "line_s": round(page.run("window.lineMs") / 1e3, 3),
                "own_bytes": int(memory["RssAnon"]) << 10,
                "most_bytes": int(memory["VmHWM"]) << 10,
            }
            if place.startswith("s3:"):
                figures["requests_until_first_sample"] = num_first
                figures |= count_requests(page, requests)
            return figures
    finally:
        server.terminate()
        server.communicate()


def count_requests(page: Page, requests: list[str]) -> dict[str, Any]:
    """Step through a clip and jump through the dataset without its list of thumbnails; return the
    requests of a step on average, and the most of a jump.
    """
    page.press("l")
    let_settle(requests)
    before = len(requests)
    for _ in range(NUM_STEPS):
        key = page.run("document.querySelector('#key').textContent")
        page.press("ArrowRight")
        page.wait(f"document.querySelector('#key').textContent !== {key!r}")
        let_settle(requests)
    requests_per_step = (len(requests) - before) / NUM_STEPS
    requests_of_jumps = []
    num_samples = page.run("fetch('/api/dataset').then((a) => a.json()).then((d) => d.num_samples)")
    for number in range(NUM_JUMPS):
        before = len(requests)
        row = (number + 1) * num_samples // (NUM_JUMPS + 1)
        page.run(f"location.hash = '#row={row}&alone=1'")
        page.wait(f"document.querySelector('#when').textContent.includes('{row:,}')")
        let_settle(requests)
        requests_of_jumps.append(len(requests) - before)
    return {
        "requests_of_steps": requests_per_step,
        "requests_of_jumps": max(requests_of_jumps),
    }


def let_settle(requests: list[str]) -> None:
    """Wait until there were no requests for a while, longer than the page waits for a next one."""
    count = -1
    while count != len(requests):
        count = len(requests)
        time.sleep(0.8)


def measure_case(
    place: Literal["folder", "s3"],
    root: Path,
    num_rounds: int,
) -> BrowseCase:
    """Measure a dataset in some rounds."""
    rounds = []
    for _ in range(num_rounds):
        for file in root.iterdir():
            with file.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with tempfile.TemporaryDirectory() as folder, serve_objects(root) as (url, requests):
            env = {
                "XDG_CACHE_HOME": f"{folder}/cache",
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": "testing",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            address = str(root) if place == "folder" else "s3://bucket/dataset"
            figures = measure_round(address, env, requests, Path(folder))
            rounds.append(figures)
            print(place, figures, flush=True)  # noqa: T201
    lists: dict[str, list[Any]] = {}
    for name in rounds[0]:
        lists[name] = [figures[name] for figures in rounds]
    index = root / INDEX_FILE
    return BrowseCase(
        place=place,
        num_rows=len(open_dataset(root)),
        index_bytes=index.stat().st_size,
        **lists,
    )


def render(report: BrowseTimes) -> str:
    """Return medians of the times, and the most memory and requests, as a table for pages."""
    rows = []
    for case in report.cases:
        times = (case.open_s, case.first_sample_s, case.list_s, case.line_s)
        counts = (case.requests_of_steps, case.requests_of_jumps)
        row = (
            f"{case.num_rows:,}",
            "a folder" if case.place == "folder" else "S3",
            *(f"{statistics.median(seconds):.2f}" for seconds in times),
            f"{max(case.own_bytes) / 1e6:.0f}",
            *(f"{max(requests):.0f}" if requests else "" for requests in counts),
        )
        rows.append(row)
    return markdown_table(HEADER, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases, print the medians and, with ``--out``, write the report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.browse")
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--dir", type=Path, metavar="DIR", help="keep datasets here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    options = parser.parse_args(argv)
    load = os.getloadavg()[0]
    cases = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for num_rows in options.rows:
            root = make_dataset(folder, num_rows)
            cases.append(measure_case("folder", root, options.rounds))
            cases.append(measure_case("s3", root, options.rounds))
    report = BrowseTimes(
        benchmark="browse",
        machine=machine_facts(),
        load=load,
        latency_s=LATENCY_S,
        cases=cases,
    )
    print(render(report))  # noqa: T201
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
