"""Fuelrail's shards read by the ``webdataset`` library: the decoder hook that its pipelines need.

::

    import webdataset
    from fuelrail.loaders.integrations.webdataset import decode_member

    dataset = webdataset.WebDataset("OUT/train-{000000..000007}.tar", shardshuffle=False)
    for sample in dataset.decode(decode_member, "rgb"):
        sample["meta.json.zst"], sample["geometry.safetensors.zst"], sample["cam_front.jpg"]

webdataset does not undo zstd on whole shards itself. Those of the frame layout are read through a pipe; their members
have no codec's suffix. webdataset may miss that the pipe failed, and then gives fewer samples: ``fuelrail verify`` or
``zstd -t`` tells::

    dataset = webdataset.WebDataset("pipe:zstd -dcq OUT/train-{000000..000007}.tar.zst", shardshuffle=False)

Members stored with a dictionary (``meta.json.dict.zst``) take it from the dataset::

    dataset.decode(partial(decode_member, dictionary=open_dataset("OUT").dictionary), "rgb")

It gives webdataset's order and resumption, not Fuelrail's; use it to look into shards, or to move over step by step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import webdataset

from fuelrail.pipeline.codecs import RAW, decode, split_name
from fuelrail.pipeline.tensors import read_tensors

if TYPE_CHECKING:
    from fuelrail.pipeline.buffers import Buffer
    from fuelrail.pipeline.dictionary import Dictionary


def decode_member(name: str, stored: Buffer, *, dictionary: Dictionary | None = None) -> Any:  # noqa: ANN401 - what webdataset asks of a handler
    """A handler for ``WebDataset.decode``: undoes the storage codec, then leaves the member to the next handlers.

    ``name`` is the field as webdataset names it, with a dot in front: ``.lidar_top.npy.p20.zst``. JSON and arrays are
    decoded by webdataset's own handlers; safetensors, which it doesn't know, here: to a dict of numpy arrays.

    Raises CodecError for a damaged member, SchemaError for damaged safetensors (webdataset wraps both in its
    DecodingError, which names sample and shard).
    """
    field, codec = split_name(name)
    if codec == RAW and not field.endswith(".safetensors"):
        return None
    raw = decode(codec, stored, dictionary=dictionary)
    if field.endswith(".safetensors"):
        return read_tensors(raw)
    return webdataset.autodecode.Continue(field, bytes(raw))
