"""``fuelrail top``: show in a terminal what running loaders do, from their metrics endpoints."""

from __future__ import annotations

import http.client
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from msgspec import Meta
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.metrics import Metric, parse
from fuelrail.pipeline.settings import Settings, flag, make_options
from fuelrail.pipeline.text import shortened

TIMEOUT_S = 5.0
_BAR = 10
_WIDE = 200  # columns of a file or a pipe: no line is cut
_MAX_BYTES = 16 << 20
_MAX_COUNT = 1e18
_MAX_STAGES = 64
_OF_A_STAGE = (
    "fuelrail_stage_threads",
    "fuelrail_stage_queue",
    "fuelrail_stage_queue_capacity",
)


class TopOptions(Settings, frozen=True, kw_only=True):
    """Options of `fuelrail.bench.top`, and the flags of ``fuelrail top``."""

    interval: Annotated[
        float,
        Meta(ge=0.05, le=3600),
        flag("seconds between updates", metavar="S"),
    ] = 1.0
    once: Annotated[bool, flag("show one interval and exit")] = False


class Reading(NamedTuple):
    """One endpoint at one moment: values by name, by (name, stage) and by (name, stage, state)."""

    time_s: float
    rank: str
    values: Mapping[tuple[str, ...], float]
    stages: Sequence[str]


class StageRow(NamedTuple):
    """One stage over one interval: shares are of the stage's thread time, in [0, 1]."""

    name: str
    threads: int
    items_per_s: float
    busy: float
    starved: float
    blocked: float
    queue: int
    capacity: int


class RankView(NamedTuple):
    """One loader over one interval; ``waiting`` is the share of time in which the trainer waited
    for data.
    """

    rank: str
    batches_per_s: float
    samples_per_s: float
    images_per_s: float
    waiting: float
    stages: Sequence[StageRow]

    @property
    def bottleneck(self) -> str | None:
        """The stage that slows the trainer down: the busiest one, if the trainer waits."""
        if self.waiting < 0.02 or not self.stages:
            return None
        return max(self.stages, key=lambda stage: stage.busy).name


def read(url: str) -> Reading:
    """Read one endpoint. Raises ConfigError where none answers, or where it is not a loader's."""
    address = url if "://" in url else f"http://{url}"
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"metrics endpoint {url!r} must be an http URL or HOST:PORT")
    if address.count("/") == 2:
        address += "/metrics"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            body = answer.read(_MAX_BYTES + 1)
        if len(body) > _MAX_BYTES:
            raise ConfigError(
                f"no metrics at {address}: the answer is larger than {_MAX_BYTES >> 20} MiB"
            )
        return digest(parse(body.decode()), time.monotonic())
    except (OSError, ValueError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)
        reason = shortened(getattr(cause, "strerror", None) or cause)
        raise ConfigError(
            f"no metrics at {address}: {reason}; is the trainer running, with "
            "fuelrail.bench.serve_metrics(loader)?"
        ) from error


def digest(metrics: Sequence[Metric], time_s: float) -> Reading:
    """Return metrics as a reading. Raises ValueError for metrics that no loader has."""
    values: dict[tuple[str, ...], float] = {}
    for name, labels, value in metrics:
        if not math.isfinite(value) or abs(value) > _MAX_COUNT:
            raise ValueError(
                f"{shortened(name)} is {value}; a loader's metrics are numbers of at most "
                f"{_MAX_COUNT:g}"
            )
        parts = (name, labels.get("stage"), labels.get("state"))
        values[tuple(filter(None, parts))] = value
    stage_labels = [labels["stage"] for _, labels, _ in metrics if "stage" in labels]
    stages = list(dict.fromkeys(stage_labels))
    if len(stages) > _MAX_STAGES:
        raise ValueError(f"{len(stages):,} stages; a loader has at most {_MAX_STAGES}")
    for stage in stages:
        lacks = [name for name in _OF_A_STAGE if (name, stage) not in values]
        if lacks:
            raise ValueError(f"{', '.join(lacks)} lacks for stage '{shortened(stage)}'")
    ranks = [labels["rank"] for _, labels, _ in metrics if "rank" in labels]
    rank = ranks[0] if ranks else "?"
    return Reading(
        time_s=time_s,
        rank=rank,
        values=values,
        stages=stages,
    )


def compare(before: Reading, now: Reading) -> RankView:
    """Return the rates and shares between two readings of one endpoint."""
    length_s = max(now.time_s - before.time_s, 1e-9)

    def grown(*key: str) -> float:
        growth = now.values.get(key, 0.0) - before.values.get(key, 0.0)
        return max(0.0, growth)

    rows = []
    for stage in now.stages:
        busy_s = grown("fuelrail_stage_seconds_total", stage, "busy")
        starved_s = grown("fuelrail_stage_seconds_total", stage, "starved")
        blocked_s = grown("fuelrail_stage_seconds_total", stage, "blocked")
        total_s = busy_s + starved_s + blocked_s or 1.0
        row = StageRow(
            name=stage,
            threads=int(now.values["fuelrail_stage_threads", stage]),
            items_per_s=grown("fuelrail_stage_items_total", stage) / length_s,
            busy=busy_s / total_s,
            starved=starved_s / total_s,
            blocked=blocked_s / total_s,
            queue=int(now.values["fuelrail_stage_queue", stage]),
            capacity=int(now.values["fuelrail_stage_queue_capacity", stage]),
        )
        rows.append(row)
    return RankView(
        rank=now.rank,
        batches_per_s=grown("fuelrail_batches_total") / length_s,
        samples_per_s=grown("fuelrail_samples_total") / length_s,
        images_per_s=grown("fuelrail_images_total") / length_s,
        waiting=min(1.0, grown("fuelrail_wait_seconds_total") / length_s),
        stages=rows,
    )


def draw(views: Sequence[RankView]) -> Group:
    """Return the views as tables."""
    parts: list[RenderableType] = []
    for view in views:
        fed = Text(
            f"trainer fed {100 * (1 - view.waiting):.0f} %",
            "green" if view.waiting < 0.02 else "bold red",
        )
        head = Text(
            f"rank {shortened(view.rank)}   {view.batches_per_s:.1f} batches/s   "
            f"{view.samples_per_s:.1f} samples/s   {view.images_per_s:.0f} images/s   "
        ).append_text(fed)
        if view.bottleneck:
            head.append(f"   held up by {shortened(view.bottleneck)}", "red")
        table = Table(box=None, pad_edge=False)
        for title in (
            "stage",
            "threads",
            "items/s",
            "busy",
            "starved",
            "blocked",
            "queue",
        ):
            table.add_column(
                title,
                justify="left" if title in ("stage", "queue") else "right",
            )
        for row in view.stages:
            share = row.queue / max(1, row.capacity)
            filled = round(_BAR * min(1.0, share))
            table.add_row(
                Text(shortened(row.name)),  # a plain string would be read as markup
                str(row.threads),
                f"{row.items_per_s:.1f}",
                f"{100 * row.busy:.0f} %",
                f"{100 * row.starved:.0f} %",
                f"{100 * row.blocked:.0f} %",
                f"{'#' * filled}{'.' * (_BAR - filled)} {row.queue}/{row.capacity}",
            )
        parts += [head, table, Text()]
    return Group(*parts)


def top(
    endpoints: str | Sequence[str],
    options: TopOptions | None = None,
    *,
    progress: Callable[[list[RankView]], object] | None = None,
    **changes: Any,  # fields of TopOptions
) -> list[RankView]:
    """Measure running loaders by their metrics endpoints; return one :class:`RankView` for each, of
    the last interval.

    ``fuelrail.bench.top("localhost:9400", once=True)`` takes the fields of :class:`TopOptions` as
    keywords. ``progress`` is called with the views of each interval. Without ``once`` it returns
    when the last loader has ended. Raises ConfigError where no loader answers.
    """
    options = make_options(TopOptions, options, changes)
    urls = [endpoints] if isinstance(endpoints, str) else endpoints
    before = {url: read(url) for url in urls}
    views: list[RankView] = []
    while before:
        time.sleep(options.interval)
        now: dict[str, Reading] = {}
        for url in before:
            try:
                now[url] = read(url)
            except ConfigError:
                if options.once:
                    raise
        if now:
            views = [compare(before[url], reading) for url, reading in now.items()]
            if progress is not None:
                progress(views)
        before = {} if options.once else now
    return views


def show(
    urls: Sequence[str],
    options: TopOptions,
    console: Console | None = None,
) -> None:
    """Show the endpoints, each interval, until interrupted or until the last loader has ended.

    A terminal shows the last interval, in place; a file or a pipe gets one after another.
    """
    console = console or Console()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            top(
                urls,
                options,
                progress=lambda views: live.update(draw(views), refresh=True),
            )
    else:
        plain = Console(file=console.file, width=_WIDE)
        top(urls, options, progress=lambda views: plain.print(draw(views)))
    if not options.once:
        console.print("the trainer has ended")
