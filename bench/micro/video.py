"""Logs of 1080p video as images of 576x320 at 10 Hz, beside FFmpeg's own decoding and scaling of
the same video.

``python -m fuelrail.bench.micro.video [--out FILE] [--quick]``. For each codec a clip of ten
seconds at 30 Hz is written twice, of the same packets: as an MCAP log of CompressedVideo, and as a
file for FFmpeg. It is a texture that moves, with noise of its own in each frame. All run on one
CPU, so with one thread, and take turns.

The reference decodes all frames and scales every third one by areas: the program ``ffmpeg``, and a
loop with PyAV, which has the libraries that Fuelrail has. Of Fuelrail, "frames of the log" also
encodes JPEGs of quality 90, and "shard" is the whole run: scan, staging, shards, index and digests.
The program is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import av
import cv2
import msgspec
import numpy as np

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.timing import (
    QUICK,
    Effort,
    LapClock,
    Quartiles,
    TimedContest,
    TimingReport,
    compare,
    render,
)
from fuelrail.bench.report.files import publish_json
from fuelrail.sharding.api import shard
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.sources.adapter.frame import Image
from fuelrail.sharding.sources.logs.source import LogSource
from fuelrail.sharding.sources.shared.pictures import JpegForm
from fuelrail.sharding.sources.shared.video import libraries

NUM_ROUNDS = 5
PROGRAM = "ffmpeg, decode and scale"
LIBRARY = "PyAV, decode and scale"
FRAMES = "fuelrail, frames of the log as JPEG"
SHARD = "fuelrail shard, the whole run"
_RATE = 30
_KEPT_RATE = 10
_SECONDS = 10
_SIZE = (1920, 1080)
_STORED = (576, 320)
_MARGIN = 400
_CODECS = {
    "h264": (
        "libx264",
        {
            "preset": "veryfast",
            "crf": "28",
            "bf": "0",
            "g": "30",
            "x264-params": "repeat-headers=1:annexb=1:scenecut=0",
        },
    ),
    "hevc": (
        "libx265",
        {
            "preset": "ultrafast",
            "crf": "30",
            "x265-params": "keyint=30:min-keyint=30:bframes=0:repeat-headers=1:annexb=1:log-level=none",
        },
    ),
    "av1": (
        "libsvtav1",
        {"preset": "11", "crf": "45", "g": "30", "svtav1-params": "pred-struct=1:lookahead=0"},
    ),
}
"""The encoder of each codec, and its options: as cameras have it, without frames that wait for
later ones.
"""
_VIDEO = "builtin_interfaces/Time timestamp\nstring frame_id\nuint8[] data\nstring format\n"
_TOPIC = "/front/video"
_OPTIONS: dict[str, Any] = {"cameras": {"front": _TOPIC}, "poses": "none", "rate": _KEPT_RATE}


class VideoFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One codec: what was decoded and kept, and each candidate's CPU time for it; medians."""

    num_frames: int
    num_kept: int
    num_bytes: int
    cpu_s: dict[str, float]
    rate: dict[str, Quartiles]
    """Fuelrail's rate over that of each of the others in the same round: of its frames of the
    log.
    """
    cpu_rate: dict[str, Quartiles]
    """The same by CPU time."""


class VideoReport(msgspec.Struct, frozen=True, kw_only=True):
    """All codecs in one run.

    ``ffmpeg`` is the program's version, None where it is not installed.
    """

    benchmark: str
    machine: MachineFacts
    libraries: str
    ffmpeg: str | None
    codecs: dict[str, VideoFigures]
    comparisons: list[TimedContest]


def write_clip(folder: Path, codec: str, num_frames: int, size: tuple[int, int]) -> list[bytes]:
    """Encode a clip into the file ``video`` and the log ``log.mcap``; return its packets."""
    encoder, options = _CODECS[codec]
    rng = np.random.default_rng(0)
    packets = []
    (width, height) = size
    texture = rng.integers(0, 256, (height + _MARGIN, width + _MARGIN)).astype(np.float32)
    texture = 128 + 10 * (cv2.GaussianBlur(texture, (0, 0), 3) - 127.5)
    noise = rng.normal(0, 2, texture.shape).astype(np.float32)
    planes = np.full((height * 3 // 2, width), 120, np.uint8)
    # Matroska wants parameter sets outside of the packets; in a log they are in them. A transport
    # stream has no AV1.
    with av.open(
        str(folder / "video"), "w", format="matroska" if codec == "av1" else "mpegts"
    ) as file:
        stream: Any = file.add_stream(encoder, rate=_RATE, options=options)
        stream.width = width
        stream.height = height
        stream.pix_fmt = "yuv420p"
        for frame_number in range(num_frames + 1):
            x = 2 * frame_number % _MARGIN
            y = frame_number % _MARGIN
            u = 97 * frame_number % _MARGIN
            v = 61 * frame_number % _MARGIN
            view = texture[y : y + height, x : x + width] + noise[v : v + height, u : u + width]
            planes[:height] = np.clip(view, 0, 255)
            frame = av.VideoFrame.from_ndarray(planes, "yuv420p")
            frame.pts = frame_number
            for packet in stream.encode(frame if frame_number < num_frames else None):
                packets.append(bytes(packet))
                file.mux(packet)
    write_log(folder / "log.mcap", packets, codec, size)
    return packets


def write_log(path: Path, packets: Sequence[bytes], codec: str, size: tuple[int, int]) -> None:
    """Write packets as messages of a camera that is calibrated."""
    from mcap.writer import CompressionType, Writer
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore

    store = get_typestore(Stores.ROS2_HUMBLE)
    store.register(get_types_from_msg(_VIDEO, "foxglove_msgs/msg/CompressedVideo"))
    types: Any = store.types
    with path.open("wb") as file:
        writer: Any = Writer(file, compression=CompressionType.NONE)
        writer.start("ros2")

        def channel(topic: str, name: str) -> int:
            text = store.generate_msgdef(name, ros_version=2)[0].encode()
            channel_id: int = writer.register_channel(
                topic, "cdr", writer.register_schema(name, "ros2msg", text)
            )
            return channel_id

        info = "sensor_msgs/msg/CameraInfo"
        video = "foxglove_msgs/msg/CompressedVideo"
        channels = channel("/front/camera_info", info), channel(_TOPIC, video)
        region = types["sensor_msgs/msg/RegionOfInterest"](0, 0, 0, 0, False)
        k = np.array([1e3, 0, size[0] / 2, 0, 1e3, size[1] / 2, 0, 0, 1])
        flat = np.eye(3).ravel()
        p = np.column_stack([k.reshape(3, 3), np.zeros(3)]).ravel()
        for number, packet in enumerate(packets):
            stamp_ns = 10**18 + number * 10**9 // _RATE
            stamp = types["builtin_interfaces/msg/Time"](*divmod(stamp_ns, 10**9))
            if not number:
                head = types["std_msgs/msg/Header"](stamp, "base_link")
                record = types[info](
                    head, size[1], size[0], "plumb_bob", np.zeros(5), k, flat, p, 0, 0, region
                )
                writer.add_message(
                    channels[0], stamp_ns, bytes(store.serialize_cdr(record, info)), stamp_ns
                )
            record = types[video](stamp, "base_link", np.frombuffer(packet, np.uint8), codec)
            writer.add_message(
                channels[1], stamp_ns, bytes(store.serialize_cdr(record, video)), stamp_ns
            )
        writer.finish()


def run_program(path: Path) -> None:
    """Decode and scale by the program."""
    scale = f"fps={_KEPT_RATE},scale={_STORED[0]}:{_STORED[1]}:flags=area"
    command = [
        "ffmpeg",
        "-v",
        "error",
        "-threads",
        "1",
        "-i",
        str(path),
        "-filter_threads",
        "1",
        "-vf",
        scale,
    ]
    subprocess.run([*command, "-f", "null", "-"], check=True)


def run_library(path: Path) -> None:
    """Decode and scale by a loop over PyAV."""
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        stream.codec_context.thread_count = 1
        for number, frame in enumerate(file.decode(stream)):
            if number % (_RATE // _KEPT_RATE) == 0:
                frame.reformat(*_STORED, interpolation="AREA")


def scanned(path: Path) -> tuple[LogSource, list[str]]:
    """Return the source of a log that makes images of the size, and the references of these."""
    source = LogSource(str(path), _OPTIONS)
    source.stored = JpegForm(90, lambda _: _STORED)
    source.sensors()
    frames = (frame for clip in source.clips() for frame in source.frames(clip))
    images = [
        image for frame in frames for image in frame.images.values() if isinstance(image, Image)
    ]
    return source, [image.ref for image in images]


def run_frames(source: LogSource, refs: Sequence[str]) -> None:
    """Decode, scale and encode the frames of a log."""
    assert sum(1 for _ in source.make_images(refs)) == len(refs)


def run_shard(path: Path) -> None:
    """Make a dataset of the log, and remove it."""
    out = path.parent / "out"
    recipe = {"size": _STORED, "quality": 90}
    shard(f"mcap:{path}", out, options=_OPTIONS, images=recipe, workers=1, progress=Quiet())
    shutil.rmtree(out)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and, with ``--out``, write the report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.video")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--quick", action="store_true", help="a few frames, to see that it runs")
    options = parser.parse_args(argv)
    num_frames, effort = (
        (30, QUICK) if options.quick else (_RATE * _SECONDS, Effort(NUM_ROUNDS, 0.0))
    )
    report = VideoReport(
        benchmark="video",
        machine=machine_facts(),
        libraries=libraries(),
        ffmpeg=_version(),
        codecs={},
        comparisons=[],
    )
    cpus = os.sched_getaffinity(0)
    for codec in _CODECS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            packets = write_clip(folder, codec, num_frames, (640, 360) if options.quick else _SIZE)
            os.sched_setaffinity(0, {min(cpus)})
            try:
                _measure(report, codec=codec, folder=folder, packets=packets, effort=effort)
            finally:
                os.sched_setaffinity(0, cpus)
    sys.stdout.write(_table(report) + "\n")
    if options.out is not None:
        publish_json(options.out, report)
    return 0


def _measure(
    report: VideoReport, codec: str, folder: Path, packets: Sequence[bytes], effort: Effort
) -> None:
    source, refs = scanned(folder / "log.mcap")
    works: dict[str, Callable[[], object]] = {}
    if report.ffmpeg is not None:
        works[PROGRAM] = partial(run_program, folder / "video")
    works[LIBRARY] = partial(run_library, folder / "video")
    works[FRAMES] = partial(run_frames, source, refs)
    works[SHARD] = partial(run_shard, folder / "log.mcap")
    clocks = {name: LapClock(work) for name, work in works.items()}
    rounds = effort.num_rounds
    report.comparisons.append(compare(f"{codec}, {len(packets)} frames", clocks, effort))
    rivals = [name for name in works if name not in (FRAMES, SHARD)]
    report.codecs[codec] = VideoFigures(
        num_frames=len(packets),
        num_kept=len(refs),
        num_bytes=sum(map(len, packets)),
        cpu_s={name: float(np.median(clock.cpu_s[-rounds:])) for name, clock in clocks.items()},
        rate={name: clocks[FRAMES].over(clocks[name], rounds) for name in rivals},
        cpu_rate={name: clocks[FRAMES].over(clocks[name], rounds, cpu=True) for name in rivals},
    )


def _version() -> str | None:
    if shutil.which("ffmpeg") is None:
        return None
    said = subprocess.run(["ffmpeg", "-version"], check=True, capture_output=True, text=True).stdout
    return said.split()[2]


def _table(report: VideoReport) -> str:
    plain = TimingReport(benchmark="video", machine=report.machine, comparisons=report.comparisons)
    lines = [
        render(plain),
        "",
        f"ffmpeg {report.ffmpeg or 'is not installed, left out'}; {report.libraries}",
    ]
    for codec, figures in report.codecs.items():
        for name, rate in figures.rate.items():
            cpu = figures.cpu_rate[name]
            lines.append(
                f"  {codec}: {FRAMES} at {rate.median:.2f} times the rate of {name} "
                f"({rate.q25:.2f} to {rate.q75:.2f}); {cpu.median:.2f} by CPU time "
                f"({cpu.q25:.2f} to {cpu.q75:.2f})"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
