"""Fuelrail's shards read by the ``webdataset`` library: the decoder hook that its pipelines need.

::

    import webdataset
    from fuelrail.loaders.integrations.webdataset import decode_member

    dataset = webdataset.WebDataset("DATASET/train-{000000..000007}.tar", shardshuffle=False)
    for sample in dataset.decode(decode_member, "rgb", pre=[]):
        sample["meta.json.zst"], sample["geometry.safetensors.zst"], sample["cam_front.jpg"]

webdataset's own handlers unpickle some members by their names' endings. `decode_member` therefore
answers for every member that is not json, npy, safetensors, jpg or png: it returns the bytes.
``pre=[]`` leaves members that end in ``.gz`` compressed, which webdataset otherwise expands without
a limit.

webdataset does not undo zstd on whole shards itself. Those of the frame layout are read through a
pipe; their members have no codec's suffix. webdataset may miss that the pipe failed, and then gives
fewer samples: ``fuelrail verify`` or ``zstd -t`` tells::

    dataset = webdataset.WebDataset("pipe:zstd -dcq DATASET/train-{000000..000007}.tar.zst",
    shardshuffle=False)

Members stored with a dictionary (``meta.json.dict.zst``) take it from the dataset::

    dataset.decode(partial(decode_member, dictionary=open_dataset("DATASET").dictionary), "rgb",
    pre=[])

It gives webdataset's order and resumption, not Fuelrail's; use it to look into shards, or to move
over step by step.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fuelrail.pipeline.errors import ImageError, needs
from fuelrail.pipeline.format.codecs import Dictionary, decode, split_name
from fuelrail.pipeline.sample.arrays import Buffer, read_tensors
from fuelrail.pipeline.sample.image_header import unpack_png

with needs("the hook for webdataset", "fuelrail[opencv,webdataset]"):
    import cv2
    import webdataset

_IMAGE_STARTS: Final = {".jpg": b"\xff\xd8\xff", ".png": b"\x89PNG\r\n\x1a\n"}


def decode_member(
    name: str,
    stored: Buffer,
    *,
    dictionary: Dictionary | None = None,
) -> Any:
    """Decode one member; a handler for ``WebDataset.decode``.

    ``name`` is the field as webdataset names it, with a dot in front: ``.lidar_top.npy.p20.zst``.
    The storage codec is undone first. Then ``.safetensors`` gives a dict of numpy arrays, and
    ``.json``, ``.npy``, ``.jpg`` and ``.png`` are left to webdataset's handlers. A ``.png`` of 16
    bits, such as instance masks, gives its values, uint16 [H, W] or [H, W, 3]: webdataset's
    handlers would cut them at 255. Every other member gives its bytes, so that no handler of
    webdataset unpickles it, opens it as another kind of file, or passes it to another program.

    Raises CodecError for a damaged member, SchemaError for damaged safetensors, ImageError for a
    jpg or png that starts as neither and for a damaged png of 16 bits (webdataset wraps them in its
    DecodingError, which names sample and shard).
    """
    field, codec = split_name(name)
    raw = decode(codec, stored, dictionary=dictionary)
    ending = field[field.rfind(".") :]
    if ending == ".safetensors":
        return read_tensors(raw)
    start = bytes(raw[:8])
    if not start.startswith(_IMAGE_STARTS.get(ending, b"")):
        # webdataset opens it with Pillow, which chooses by the content: PostScript would start
        # Ghostscript.
        raise ImageError(
            f"{field[1:]!r} is not a {ending[1:]} image: it starts with bytes {start.hex(' ')}"
        )
    if ending == ".png" and bytes(raw[24:25]) == b"\x10":  # bits of a value, in the header
        unpacked = unpack_png(raw, bits=(16,))
        png = np.frombuffer(unpacked, np.uint8)
        pixels = cv2.imdecode(png, cv2.IMREAD_UNCHANGED)
        if pixels is None:
            raise ImageError("a PNG of 16 bits cannot be decoded: its pixel data are broken")
        rgb = pixels if pixels.ndim == 2 else pixels[..., ::-1]
        return np.ascontiguousarray(rgb, np.uint16)
    if ending in {".json", ".npy", *_IMAGE_STARTS}:
        return webdataset.autodecode.Continue(field, bytes(raw))
    return bytes(raw)
