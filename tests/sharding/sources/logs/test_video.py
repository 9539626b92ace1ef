"""Video to JPEG: the frame that was asked for, decoded once, in the colours of the video."""

from __future__ import annotations

import av
import cv2
import numpy as np
import pytest
import simplejpeg
from av.video.reformatter import ColorRange, Colorspace

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared.pictures import JpegForm
from fuelrail.sharding.sources.shared.video import (
    StreamDecoder,
    VideoFile,
    is_keyframe,
    stream_size,
    video_frames,
)

SIZE = (96, 64)
PERIODS = [10, 8, 12, 10, 9, 11]
"""In hundredths of a second."""


def picture(number: int, size=SIZE) -> np.ndarray:
    """RGB (H, W, 3): the number as six blocks of 16 px, over a slope."""
    width, height = size
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:] = np.linspace(40, 200, width, dtype=np.uint8)[None, :, None]
    pixels[16:, :, 2] = 60 + number
    for bit in range(6):
        pixels[:16, bit * 16 : bit * 16 + 16] = 255 * (number >> bit & 1)
    return pixels


def number_of(jpeg: bytes) -> int:
    image = simplejpeg.decode_jpeg(jpeg, "GRAY")[..., 0]
    return sum(
        int(image[4:12, bit * 16 + 4 : bit * 16 + 12].mean() > 127) << bit for bit in range(6)
    )


def write_video(
    path,
    codec="libx264",
    number=30,
    options=None,
    container=None,
    pix_fmt="yuv420p",
):
    """A video of numbered frames, with varying times."""
    with av.open(str(path), "w", format=container) as file:
        stream = file.add_stream(codec, rate=100, options=options or {})
        stream.width, stream.height = SIZE
        stream.pix_fmt = pix_fmt
        time = 0
        for index in range(number):
            frame = av.VideoFrame.from_ndarray(picture(index), "rgb24")
            frame.pts = time
            time += PERIODS[index % len(PERIODS)]
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return str(path)


CASES = {
    "h264, B-frames": ("libx264", {"g": "8", "bf": "3", "preset": "veryfast"}),
    "h264, open groups": (
        "libx264",
        {
            "g": "8",
            "bf": "3",
            "x264-params": "open-gop=1:scenecut=0",
            "preset": "veryfast",
        },
    ),
    "hevc, open groups": (
        "libx265",
        {"x265-params": "keyint=8:min-keyint=8:bframes=3:open-gop=1:log-level=none"},
    ),
    "av1": (
        "libsvtav1",
        {"g": "8", "preset": "12", "svtav1-params": "lookahead=0"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_frame_n_is_frame_n_and_each_is_decoded_once(tmp_path, case):
    codec, options = CASES[case]
    video = VideoFile(write_video(tmp_path / "a.mp4", codec, options=options))
    facts = video.facts()
    assert (facts.width, facts.height, facts.num_frames) == (*SIZE, 30)
    jpegs = dict(video.jpegs(range(30)))
    assert [number_of(jpegs[number]) for number in range(30)] == list(range(30))
    assert video.num_decoded == 30
    for frames in ([0], [17], [7, 8, 9], [3, 28], [29]):
        video.num_decoded = 0
        assert [(number, number_of(jpeg)) for number, jpeg in video.jpegs(frames)] == [
            (n, n) for n in frames
        ]
        assert video.num_decoded <= 30


@pytest.mark.parametrize(("codec", "container"), [("libx264", "h264"), ("libx265", "hevc")])
def test_frames_of_a_raw_stream_are_counted(tmp_path, codec, container):
    options = (
        {"x265-params": "log-level=none:bframes=2:keyint=10"}
        if codec == "libx265"
        else {"bf": "2", "g": "10"}
    )
    path = write_video(tmp_path / f"a.{container}", codec, options=options, container=container)
    assert [(number, number_of(jpeg)) for number, jpeg in video_frames(path, [0, 13, 29])] == [
        (0, 0),
        (13, 13),
        (29, 29),
    ]
    with pytest.raises(SourceError, match="has 30 frames, and no frame 30"):
        list(video_frames(path, [30]))


def decode_colour(luma, blue, red, matrix, *, full) -> np.ndarray:
    """RGB of one YCbCr value after ITU-T H.273."""
    kr, kb = {"709": (0.2126, 0.0722), "601": (0.299, 0.114)}[matrix]
    y, cb, cr = (
        (luma, blue - 128, red - 128)
        if full
        else (
            (luma - 16) * 255 / 219,
            (blue - 128) * 255 / 224,
            (red - 128) * 255 / 224,
        )
    )
    r = y + 2 * (1 - kr) * cr
    b = y + 2 * (1 - kb) * cb
    return np.array([r, (y - kr * r - kb * b) / (1 - kr - kb), b])


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("matrix", ["601", "709"])
@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv444p", "yuv420p10le"])
def test_range_matrix_and_depth_are_converted(tmp_path, pix_fmt, matrix, full):
    path = str(tmp_path / "a.mp4")
    value = (110, 100, 150)
    with av.open(path, "w") as file:
        stream = file.add_stream("libx264", rate=10, options={"qp": "1", "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = *SIZE, pix_fmt
        context = stream.codec_context
        context.colorspace = Colorspace.ITU709 if matrix == "709" else Colorspace.ITU601
        context.color_range = ColorRange.JPEG if full else ColorRange.MPEG
        frame = av.VideoFrame(*SIZE, pix_fmt)
        for plane, level in zip(frame.planes, value, strict=True):
            is_deep = pix_fmt.endswith("10le")
            data = np.full(
                plane.buffer_size // (2 if is_deep else 1),
                level * (4 if is_deep else 1),
                "<u2" if is_deep else "u1",
            )
            plane.update(data.tobytes())
        frame.pts = 0
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    ((_, jpeg),) = video_frames(path, [0], JpegForm(100))
    rgb = simplejpeg.decode_jpeg(jpeg)[8:-8, 8:-8].reshape(-1, 3).mean(0)
    np.testing.assert_allclose(rgb, decode_colour(*value, matrix, full=full), atol=2.5)


def test_quality_90_is_near_the_video(tmp_path):
    path = str(tmp_path / "a.mp4")
    rng = np.random.default_rng(3)
    originals = []
    for coarse in rng.integers(40, 215, (5, 9, 16, 3), np.uint8):
        smooth = cv2.resize(coarse, (480, 270), interpolation=cv2.INTER_CUBIC).astype(float)
        grain = cv2.GaussianBlur(rng.normal(0, 25, (270, 480, 1)), (3, 3), 0)[..., None]
        originals.append(np.clip(smooth + grain, 0, 255).astype(np.uint8))
    with av.open(path, "w") as file:
        stream = file.add_stream("libx264", rate=10, options={"crf": "20", "preset": "veryfast"})
        stream.width = 480
        stream.height = 270
        stream.pix_fmt = "yuv420p"
        for index, original in enumerate(originals):
            frame = av.VideoFrame.from_ndarray(original, "rgb24")
            frame.pts = index
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    with av.open(path) as file:
        decoded = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    jpegs = [simplejpeg.decode_jpeg(jpeg) for _, jpeg in video_frames(path, range(5))]

    def psnr(image):
        return 10 * np.log10(
            255**2 / np.mean((np.array(image, float) - np.array(originals, float)) ** 2)
        )

    assert psnr(decoded) - psnr(jpegs) < 0.5


PACKETS = {
    "h264": (
        "libx264",
        {
            "g": "5",
            "bf": "0",
            "x264-params": "annexb=1:repeat-headers=1:scenecut=0",
        },
    ),
    "hevc": (
        "libx265",
        {"x265-params": "log-level=none:bframes=0:keyint=5:repeat-headers=1"},
    ),
    "obu": (
        "libsvtav1",
        {
            "g": "5",
            "preset": "12",
            "svtav1-params": "pred-struct=1:lookahead=0",
        },
    ),
}
"""By the container of raw packets."""


@pytest.mark.parametrize(
    ("container", "name"), [("h264", "h264"), ("hevc", "h265"), ("obu", "av1")]
)
def test_packets_one_by_one(tmp_path, container, name):
    codec, options = PACKETS[container]
    path = write_video(tmp_path / "a.mkv", codec, 12, options, container=container)
    with av.open(path) as file:
        packets = [bytes(packet) for packet in file.demux(video=0) if packet.size]
    assert [frame for frame, packet in enumerate(packets) if is_keyframe(packet, name, "t")] == [
        0,
        5,
        10,
    ]
    assert stream_size(packets[0], name, "t") == SIZE
    decoder = StreamDecoder(name, JpegForm(), "t")
    frames = {6, 7, 9}
    images = [
        image for frame in range(5, 10) for image in decoder.push(frame, packets[frame], frames)
    ] + list(decoder.flush(frames))
    assert [(number, number_of(jpeg)) for number, jpeg in images] == [
        (6, 6),
        (7, 7),
        (9, 9),
    ]
    assert decoder.num_decoded == 5


def test_another_codec_and_no_video_are_named(tmp_path):
    path = write_video(tmp_path / "a.mkv", "mpeg4", 3)
    with pytest.raises(SourceError, match="codec 'mpeg4'; h264, hevc, av1 are decoded"):
        list(video_frames(path, [0]))
    (tmp_path / "b.mp4").write_bytes(b"no video")
    with pytest.raises(SourceError, match=r"b.mp4' cannot be opened"):
        VideoFile(str(tmp_path / "b.mp4")).facts()
    path = write_video(tmp_path / "c.mp4", number=3)
    with pytest.raises(SourceError, match="has 3 frames, and no frame 7"):
        list(video_frames(path, [7]))
