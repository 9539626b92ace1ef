"""The turbo backend behind the protocol of decoders that take batches, into memory of the host or of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from fuelrail.loaders.decode import BACKENDS
from fuelrail.loaders.decode.protocol import wait_on_host
from fuelrail.loaders.decode.turbo import TurboDecoder
from fuelrail.pipeline.errors import ImageError

if TYPE_CHECKING:
    import pytest


class BatchedTurbo(TurboDecoder):
    """Decodes images one by one on the host; what was asked for is counted."""

    name = "batched"
    num_refused = 7
    sizes: ClassVar[list[int]] = []
    num_closed = 0

    def __init__(self, device: object = "cpu", num_threads: int = 2, **options: object) -> None:
        super().__init__()
        self.device = torch.device(str(device))

    def close(self) -> None:
        type(self).num_closed += 1

    def new_output(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(
            shape,
            9,
            dtype=torch.uint8,
            device=None if self.device.type == "meta" else self.device,
        )

    def decode_batch(self, encoded, image_maps, out, interpolation="bilinear"):
        type(self).sizes.append(len(encoded))
        errors = [
            self._decode(*task, interpolation)
            for task in zip(encoded, image_maps, out, strict=True)
        ]
        if self.device.type == "cuda":
            wait_on_host(torch.cuda.current_stream(self.device))
        return errors

    def _decode(self, data, image_map, picture, interpolation) -> ImageError | None:
        picture.zero_()  # on a device, the kernel that writes
        if data is None:
            return None
        with torch._C._DisableTorchDispatch():
            plain = picture.as_subclass(torch.Tensor)
        pixels = np.empty(plain.shape, np.uint8)
        try:
            self.decode_into(data, image_map, pixels, interpolation)
        except ImageError as error:
            return error
        plain.numpy()[:] = pixels
        return None


def install(monkeypatch: pytest.MonkeyPatch, kind: type[BatchedTurbo] = BatchedTurbo) -> None:
    """Make it the backend ``batched``, one of those that know devices."""
    kind.sizes = []
    monkeypatch.setitem(BACKENDS, "batched", lambda place: kind(place.device))
