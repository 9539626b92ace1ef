"""Video to JPEG: each frame is decoded once, in order, and encoded from the decoder's planes.

Frame n is the n-th in the order of presentation, for any order in the file. JPEG (JFIF) wants the
matrix of BT.601 and the full range: planes of another matrix, range or depth are converted, and not
by way of RGB. Video without a matrix is BT.709 from 720 lines on, else BT.601, as players have it.

PyAV (the extra ``video``) brings FFmpeg.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import simplejpeg
from msgspec import Meta

from fuelrail.pipeline.errors import ConfigError, SourceError, needs
from fuelrail.sharding.sources.adapter.source import FrameSettings
from fuelrail.sharding.sources.shared.pictures import (
    JPEG_QUALITY,
    JpegForm,
    StoredJpeg,
)
from fuelrail.sharding.sources.shared.protobuf import varint

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U8
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.schema import F64

CODECS: Final = ("h264", "hevc", "av1")
_NAMES: Final = {
    "h265": "hevc",
    "avc": "h264",
    "avc1": "h264",
    "hvc1": "hevc",
    "hev1": "hevc",
}
_BOXES: Final = {"h264": "h264", "hevc": "hevc", "av1": "obu"}
_HD_LINES: Final = 720
_LARGE_BYTES = 4 << 30
_END_BYTES = 4096
_UNKNOWN_MATRIX = 2
_BT709 = 1
_BT601 = 5
_MATRICES: Final = {
    1: (0.2126, 0.0722),
    4: (0.30, 0.11),
    5: (0.299, 0.114),
    6: (0.299, 0.114),
    7: (0.212, 0.087),
    9: (0.2627, 0.0593),
}
"""Matrix coefficients of ITU-T H.273 table 4: KR and KB by the code."""
_FULL: Final = 2
_AS_DECODED: Final = JpegForm()
_FINE: Final = 2.5
"""What chroma adds to luma is kept in steps of 1 / 2.5."""


class VideoFacts(NamedTuple):
    """Size [px], codec, number of frames, and the first frame that can be decoded: those before
    have no keyframe.
    """

    width: int
    height: int
    codec: str
    num_frames: int
    first_frame: int


class _Packet(NamedTuple):
    pts: int
    is_keyframe: bool


class _ShownPackets(NamedTuple):
    """Packets of the frames that are shown; in the order of presentation where they have times,
    else of the file.
    """

    packets: list[_Packet]
    has_times: bool


class VideoSettings(FrameSettings, frozen=True, kw_only=True):
    """Options of sources that may have video."""

    video_quality: Annotated[
        int, Meta(ge=1, le=100, description="JPEG quality of frames of video")
    ] = JPEG_QUALITY
    frames: Annotated[
        Literal["all", "keyframes"],
        Meta(description="keyframes: take those of video alone"),
    ] = "all"
    libraries: str = ""
    """Versions that decide the bytes of frames of video; filled in, and other ones are refused."""

    def check_libraries(self) -> None:
        """Raise ConfigError where the dataset's video was decoded with other libraries than
        those that are here.
        """
        if self.libraries and self.libraries != libraries():
            raise ConfigError(
                f"the dataset's video was decoded with {self.libraries}, here is "
                f"{libraries()}: install those versions, or make the dataset again"
            )


def libraries() -> str:
    """Return what decides the bytes of JPEGs of video: versions of PyAV, FFmpeg's decoders and
    scaler, simplejpeg.
    """
    from importlib.metadata import version

    if importlib.util.find_spec("av") is None:
        return "no PyAV"
    import av

    parts = [
        f"{name} {'.'.join(map(str, av.library_versions[name]))}"
        for name in ("libavcodec", "libswscale")
    ]
    return ", ".join(
        [
            f"PyAV {av.__version__}",
            *parts,
            f"simplejpeg {version('simplejpeg')}",
        ]
    )


def check_decoder(where: str) -> None:
    """Raise ConfigError where video is to be decoded and PyAV is not installed."""
    with needs(f"{where} is video, which", "fuelrail[video]"):
        importlib.import_module("av")


def video_frames(
    path: str,
    numbers: Iterable[int],
    form: JpegForm = _AS_DECODED,
) -> Iterator[tuple[int, bytes]]:
    """Yield these frames of a video file with their numbers, as JPEG, in the order of presentation.

    A frame is decoded once; what is between two groups of pictures that are wanted is skipped.
    Raises SourceError for a file that is cut, a frame that is not there or cannot be decoded, a
    rotation flag, and another codec.
    """
    yield from VideoFile(path).jpegs(numbers, form)


class VideoFile:
    """A video file: mp4, or a raw stream.

    ``num_decoded`` counts the frames that the decoder gave.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._where = f"video '{path}'"
        self.num_decoded = 0

    def facts(self) -> VideoFacts:
        """Return what the index of the file states; without an index count packets, decode nothing.

        Raises SourceError for a file whose index leads beyond its end, and as :func:`video_frames`
        does.
        """
        with self._open() as container:
            stream = _select_stream(container)
            context = stream.codec_context
            head = (
                context.width,
                context.height,
                _name_codec(context.name, self._where),
            )
            entries = list(getattr(stream, "index_entries", ()))  # PyAV has it from 17 on
            if entries and len(entries) == stream.frames and entries[0].is_keyframe:
                end = max(entry.pos + entry.size for entry in entries)
                if end > container.size:
                    raise SourceError(
                        f"{self._where} is cut off: it has {container.size} bytes, its index {end}"
                    )
                return VideoFacts(*head, sum(not entry.is_discard for entry in entries), 0)
            packets = self._read_packets(container).packets
            first = next(
                (number for number, packet in enumerate(packets) if packet.is_keyframe),
                len(packets),
            )
            return VideoFacts(*head, len(packets), first)

    def jpegs(
        self, numbers: Iterable[int], form: JpegForm = _AS_DECODED
    ) -> Iterator[tuple[int, bytes]]:
        """Yield frames as :func:`video_frames`."""
        frame_numbers = sorted(set(numbers))
        if not frame_numbers:
            return
        order, has_times = self.order
        if frame_numbers[-1] >= len(order):
            raise SourceError(
                f"{self._where} has {len(order)} frames, and no frame {frame_numbers[-1]}"
            )
        if not has_times:
            # A raw stream has no times: frames are counted.
            chosen = set(frame_numbers)
            number = -1
            with self._open() as container:
                encoder = _Encoder(form, self._where)
                for number, frame in enumerate(self._decode_frames(container)):
                    if number in chosen:
                        yield number, encoder.jpeg(frame, number)
                    if number >= frame_numbers[-1]:
                        return
            raise SourceError(
                f"{self._where} has {number + 1} frames, and no frame {frame_numbers[-1]}"
            )
        keys = [position for position, packet in enumerate(order) if packet.is_keyframe]
        runs: list[tuple[int, list[int]]] = []
        group = -2
        for number in frame_numbers:
            group_of_frame = int(np.searchsorted(keys, number, "right")) - 1
            if group_of_frame < 0:
                raise SourceError(
                    f"{self._where}: frame {number} comes before the first keyframe, frame "
                    f"{keys[:1]}"
                )
            if group_of_frame > group + 1:
                runs.append((keys[group_of_frame], []))
            group = group_of_frame
            runs[-1][1].append(number)
        # Each run is decoded from a keyframe on; frames are known by their times.
        number_of = {packet.pts: position for position, packet in enumerate(order)}
        for key, run in runs:
            remaining = set(run)
            with self._open() as container:
                stream = _select_stream(container)
                if key:
                    container.seek(order[key].pts, stream=stream)
                if all(order[number].is_keyframe for number in run):
                    stream.codec_context.skip_frame = "NONKEY"
                encoder = _Encoder(form, self._where)
                for frame in self._decode_frames(container):
                    number = number_of.get(frame.pts, -1)
                    if number in remaining:
                        remaining.remove(number)
                        yield number, encoder.jpeg(frame, number)
                    if not remaining:
                        break
            if remaining:
                raise SourceError(
                    f"{self._where}: frame {min(remaining)} cannot be decoded: is the file cut, "
                    "or damaged?"
                )

    @cached_property
    def order(self) -> _ShownPackets:
        """The packets of the frames that are shown."""
        with self._open() as container:
            return self._read_packets(container)

    def _read_packets(self, container: Any) -> _ShownPackets:
        packets = [
            _Packet(packet.pts, packet.is_keyframe)
            for packet in container.demux(_select_stream(container))
            if packet.size and not packet.is_discard
        ]
        times = {packet.pts for packet in packets}
        if None not in times and len(times) == len(packets):
            return _ShownPackets(sorted(packets), has_times=True)
        if packets and not packets[0].is_keyframe:
            raise SourceError(
                f"{self._where} has no times and does not begin with a keyframe, so its "
                "frames have no numbers: cut it at a keyframe"
            )
        return _ShownPackets(packets, has_times=False)

    def _decode_frames(self, container: Any) -> Iterator[Any]:
        import av

        before = self.num_decoded
        try:
            for frame in container.decode(_select_stream(container)):
                self.num_decoded += 1
                yield frame
        except av.error.FFmpegError as error:
            number = self.num_decoded - before
            raise SourceError(
                f"{self._where} cannot be decoded after {number} frames: {error}"
            ) from error

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        import av

        try:
            with Path(self._path).open("rb") as file:
                # FFmpeg would read zeros at the end of a large file eight bytes at a time.
                if file.seek(0, io.SEEK_END) > _LARGE_BYTES:
                    file.seek(-_END_BYTES, io.SEEK_END)
                    if not file.read().strip(b"\0"):
                        raise SourceError(
                            f"{self._where} ends with zeros: it was not written to its end; "
                            "cut it with ffmpeg"
                        )
            container = av.open(self._path)
        except (av.error.FFmpegError, OSError) as error:
            text = f"{self._where} cannot be opened ({error}): is it cut off, or no video?"
            raise SourceError(text) from error
        with container:
            if not _list_video_streams(container):
                raise SourceError(f"{self._where} has no video stream of a codec that FFmpeg knows")
            _name_codec(_select_stream(container).codec_context.name, self._where)
            yield container


def _list_video_streams(container: Any) -> list[Any]:
    return [stream for stream in container.streams.video if stream.codec_context is not None]


def _select_stream(container: Any) -> Any:
    """Return the stream that the program ffmpeg takes of several, such as a preview and the video:
    the largest picture.

    The one that is marked as default counts five million pixels more, and a cover comes last.
    """
    from av.stream import Disposition

    def rank(stream: Any) -> tuple[bool, int]:
        context = stream.codec_context
        marks = stream.disposition
        num_pixels = context.width * context.height
        if marks & Disposition.default:
            num_pixels += 5_000_000
        return not marks & Disposition.attached_pic, num_pixels

    return max(_list_video_streams(container), key=rank)


class StreamDecoder:
    """Decodes packets that come one by one, as messages of a log do: Annex B, or OBUs of AV1,
    from a keyframe on.
    """

    def __init__(self, codec: str, form: JpegForm, where: str) -> None:
        import av

        name = _name_codec(codec, where)
        # FFmpeg's own decoder of AV1 needs hardware for it.
        self._context: Any = av.CodecContext.create("libdav1d" if name == "av1" else name, "r")
        self._where = where
        self._encoder = _Encoder(form, where)
        self.num_decoded = 0

    def push(
        self,
        number: int,
        data: Buffer,
        frame_numbers: set[int],
    ) -> Iterator[tuple[int, bytes]]:
        """Decode the packet of frame ``number``; yield what is ready of the wanted frames, with
        their numbers.
        """
        import av

        packet = av.Packet(bytes(data))
        packet.pts = packet.dts = number
        yield from self._decode(packet, frame_numbers)

    def flush(self, frame_numbers: set[int]) -> Iterator[tuple[int, bytes]]:
        """Yield the wanted ones of the frames that the decoder still has."""
        yield from self._decode(None, frame_numbers)

    def _decode(self, packet: Any, frame_numbers: set[int]) -> Iterator[tuple[int, bytes]]:
        import av

        try:
            frames = self._context.decode(packet)
        except av.error.FFmpegError as error:
            place = "the end" if packet is None else f"message {packet.pts}"
            raise SourceError(
                f"{self._where}: the video cannot be decoded at {place}: {error}"
            ) from error
        self.num_decoded += len(frames)
        for frame in frames:
            if frame.pts in frame_numbers:
                yield frame.pts, self._encoder.jpeg(frame, frame.pts)


def stream_size(data: Buffer, codec: str, where: str) -> tuple[int, int]:
    """Return width and height [px] of a stream by its first keyframe's parameter sets."""
    import av

    try:
        with av.open(
            io.BytesIO(bytes(data)), format=_BOXES[_name_codec(codec, where)]
        ) as container:
            context = container.streams.video[0].codec_context
            size = context.width, context.height
    except (av.error.FFmpegError, IndexError) as error:
        raise SourceError(
            f"{where}: the keyframe has no parameter sets that FFmpeg understands: {error}"
        ) from error
    if not all(size):
        raise SourceError(f"{where}: the keyframe does not state its size")
    return size


def is_keyframe(data: Buffer, codec: str, where: str) -> bool:
    """Return whether a packet, by its first bytes, begins a group of pictures.

    By NAL units of H.264 (ITU-T H.264 table 7-1) and HEVC (H.265 table 7-1), and OBUs of AV1 (AV1
    6.2.2).
    """
    head = bytes(memoryview(data)[:512])
    name = _name_codec(codec, where)
    if name == "av1":
        position = 0
        while position < len(head):
            kind = head[position] >> 3 & 15
            if kind == 1:
                return True
            is_extended = head[position] >> 2 & 1
            is_sized = head[position] >> 1 & 1
            position += 1 + is_extended
            if not is_sized:
                break
            try:
                length, position = varint(head, position)
            except ValueError:  # the head ends
                break
            position += length
        return False
    position = head.find(b"\0\0\1")
    has_parameters = False
    while position >= 0 and position + 3 < len(head):
        head_byte = head[position + 3]
        kind = head_byte & 0x1F if name == "h264" else head_byte >> 1 & 0x3F
        if kind <= 5 if name == "h264" else kind < 32:  # a picture
            if name == "h264":
                return kind == 5
            return 16 <= kind < 24
        has_parameters |= kind == (7 if name == "h264" else 33)
        position = head.find(b"\0\0\1", position + 3)
    # notes of an encoder may fill the head; only a keyframe's parameter sets precede them
    return has_parameters


def _name_codec(name: str, where: str) -> str:
    """Return FFmpeg's name of the codec."""
    plain = name.lower().strip()
    plain = "av1" if plain == "libdav1d" else _NAMES.get(plain, plain)
    if plain not in CODECS:
        raise SourceError(
            f"{where} has the codec '{name}'; {', '.join(CODECS)} are decoded: convert it "
            "with ffmpeg"
        )
    return plain


class _Encoder:
    """Encodes frames of one video as JPEG."""

    def __init__(self, form: JpegForm, where: str) -> None:
        self._form = form
        self._where = where
        from av.video.reformatter import VideoReformatter

        self._reformatter = VideoReformatter()

    def jpeg(self, frame: Any, number: int) -> bytes:
        """Encode the frame as JPEG; raise SourceError for one that is damaged or rotated.

        Its planes have 8 bits, full range, BT.601, with the chroma of the video, or scaled and
        4:2:0.
        """
        if frame.is_corrupt:
            raise SourceError(
                f"{self._where}: frame {number} is damaged, or what it builds on is missing"
            )
        if frame.rotation:
            raise SourceError(
                f"{self._where} has a rotation flag of {frame.rotation} degrees, and its "
                "calibration may be of either orientation: rotate it or clear the flag with ffmpeg"
            )
        name = frame.format.name
        is_full = name.startswith("yuvj") or frame.color_range == _FULL
        matrix = frame.colorspace
        if matrix == _UNKNOWN_MATRIX:
            matrix = _BT709 if frame.height >= _HD_LINES else _BT601
        if matrix not in _MATRICES:
            raise SourceError(
                f"{self._where} has the colour matrix {matrix} of ITU-T H.273; known: "
                f"{list(_MATRICES)}"
            )
        sides: tuple[int, int] = (frame.width, frame.height)
        size = sides if self._form.size is None else self._form.size(sides)
        chroma = next(
            (
                subsampling
                for subsampling in ("444", "422")
                if subsampling in name and self._form.size is None
            ),
            "420",
        )
        layout = f"{'yuvj' if name.startswith('yuvj') else 'yuv'}{chroma}p"
        if size != sides or name != layout:
            # More bits, other planes or another size: matrix and range stay. Both sides are called
            # limited, also where they are full: depth and layout change, levels stay.
            frame = self._reformatter.reformat(
                frame,
                *size,
                format=layout,
                src_colorspace=frame.colorspace,
                dst_colorspace=frame.colorspace,
                src_color_range=1,
                dst_color_range=1,
                interpolation="AREA" if size != sides else None,
            )
        planes = [
            np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width]
            for plane in frame.planes
        ]
        if not is_full or _MATRICES[matrix] != _MATRICES[_BT601]:
            planes = _convert_planes(planes, matrix, is_full)
        contiguous = map(np.ascontiguousarray, planes)
        data: bytes = simplejpeg.encode_jpeg_yuv_planes(*contiguous, quality=self._form.quality)
        if self._form.size is None:
            return data
        return StoredJpeg(data)


def _convert_planes(planes: Sequence[U8], matrix: int, is_full: bool) -> list[U8]:
    """Convert planes to BT.601 of full range; the product of two matrices of ITU-T H.273, 8.3.

    Gray stays gray: new luma is the old one and a little of both chromas, new chroma is of the
    chromas alone, at their own size. So no plane goes through RGB.
    """
    with needs("video of other colours than a JPEG's", "fuelrail[video]"):
        import cv2

    luma, blue, red = planes
    change = np.linalg.inv(_make_ycc2rgb(_BT601)) @ _make_ycc2rgb(matrix)
    y_scale, c_scale = (1.0, 1.0) if is_full else (255 / 219, 255 / 224)
    black = 0 if is_full else 16

    def mix_chromas(blue_share: float, red_share: float) -> U8:
        grey = 128 * (1 - blue_share - red_share)
        chroma = cv2.addWeighted(blue, blue_share, red, red_share, grey)
        return np.asarray(chroma, np.uint8)

    chromas = []
    for row in (1, 2):
        blue_share = change[row, 1] * c_scale
        red_share = change[row, 2] * c_scale
        chromas.append(mix_chromas(blue_share, red_share))
    if np.allclose(change, np.eye(3)):
        return [
            np.asarray(
                cv2.addWeighted(luma, y_scale, luma, 0, -black * y_scale),
                np.uint8,
            ),
            *chromas,
        ]
    added = mix_chromas(
        blue_share=_FINE * change[0, 1] * c_scale,
        red_share=_FINE * change[0, 2] * c_scale,
    )
    size = (luma.shape[1], luma.shape[0])
    spread = cv2.resize(added, size, interpolation=cv2.INTER_LINEAR)
    shift = -black * y_scale - 128 / _FINE
    return [
        np.asarray(cv2.addWeighted(luma, y_scale, spread, 1 / _FINE, shift), np.uint8),
        *chromas,
    ]


def _make_ycc2rgb(matrix: int) -> F64:
    """Return the matrix (3, 3) from full-range Y, Cb, Cr to R, G, B."""
    kr, kb = _MATRICES[matrix]
    kg = 1 - kr - kb
    red = 2 * (1 - kr)
    blue = 2 * (1 - kb)
    green = [1, -kb * blue / kg, -kr * red / kg]
    return np.array([[1, 0, red], green, [1, blue, 0]])
