"""A teacher's logits made small, by keys; and the digest of its weights."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from fuelrail.pipeline.channels.logits import TOPK, Logits
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.transforms.randomness import ALL_CAMERAS, uniforms

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel

_VALUES_AT_ONCE: Final = 1 << 24


class Reduction(NamedTuple):
    """How logits become `Logits`.

    Attributes:
        temperature: what they are divided by before the softmax.
        positions: the share of a sample's positions that are stored, those of the largest entropy
            (arXiv 2602.01395).
        seed, epoch: of the draws, beside the sample's key and the channel's name: so they do not
            depend on the order.
    """

    temperature: float = 1.0
    positions: float = 1.0
    seed: int = 0
    epoch: int = 0

    def __call__(self, output: object, channel: Channel, key: str) -> Logits:
        """Return what is stored of logits [T, V] of a sample; raise ConfigError, with its key,
        for NaN or another V.
        """
        k = channel.shape[1]
        size = channel.vocabulary.size if channel.vocabulary is not None else 0
        assert k is not None
        shape: tuple[int, ...] = getattr(output, "shape", ())
        if len(shape) != 2 or shape[1] != size:
            form = list(shape) or type(output).__name__
            raise ConfigError(
                f"output '{channel.name}' of sample {key!r} is {form}; the table has logits "
                f"[T, {size}]"
            )
        # Copied: an array may be one to read only.
        logits = output if isinstance(output, Tensor) else torch.tensor(output)
        digest = xxhash.xxh3_64_intdigest(f"{channel.name}\0{key}".encode())
        (drawn,) = uniforms(
            self.seed,
            epoch=self.epoch,
            sample=digest - (1 << 63),
            cameras=[ALL_CAMERAS],
            stream="logits",
            count=len(logits),
        )
        parts = []
        step = max(1, _VALUES_AT_ONCE // size)
        for first in range(0, max(1, len(logits)), step):
            softened = logits[first : first + step].float() / self.temperature
            logs = softened.log_softmax(-1)
            is_nan = logs.isnan().any(-1)
            if bool(is_nan.any()):
                position = first + int(is_nan.nonzero()[0])
                raise ConfigError(
                    f"output '{channel.name}' of sample {key!r} has NaN, an infinity or no "
                    f"finite logit at position {position}"
                )
            likely = logs.exp()
            entropy = -torch.xlogy(likely, likely).sum(-1)
            if channel.kind == TOPK:
                weights, indices = likely.topk(k, dim=-1)
                # Not 1 - sum: of a sure teacher that has no digits.
                tail = likely.scatter(-1, indices, 0).sum(-1)
            else:
                # At steps of 1 / k along the cumulative distribution, from where `drawn` says: a
                # token of probability q is drawn floor(k q) or ceil(k q) times, k q times in the
                # mean, as with independent draws, and with less variance (systematic sampling:
                # Madow and Madow, 1944).
                sums = likely.cumsum(-1, dtype=torch.float64)
                start = torch.from_numpy(drawn[first : first + step]).to(sums.device)[:, None]
                steps = torch.arange(k, device=sums.device) + start
                places = steps / k * sums[:, -1:]
                indices = torch.searchsorted(sums, places, right=True).clamp(max=size - 1)
                weights = None
                tail = None
            part = Logits(indices, weights, tail, entropy)
            parts.append(part.map(lambda values: values.cpu().numpy()))
        columns = []
        for arrays in zip(*parts, strict=True):
            column = None if arrays[0] is None else np.concatenate(arrays)
            columns.append(column)
        reduced = Logits(*columns)
        # The positions of the largest entropy.
        num_stored = math.ceil(self.positions * len(logits))
        positions = np.argsort(-reduced.mask, kind="stable")
        mask = np.zeros(len(logits), bool)
        mask[positions[:num_stored]] = True
        return reduced._replace(mask=mask)


def weights_digest(model: object) -> str | None:
    """Return the SHA-256 of the weights of a model, as hex; None where it has none.

    These are of all modules of torch that a model is, has as attributes, or, as a function, uses by
    name.
    """
    digest = hashlib.sha256()
    has_weights = False
    for name, module in _modules(model):
        for entry, value in module.state_dict().items():
            if isinstance(value, Tensor):
                tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
                header = f"{name}.{entry} {tensor.dtype} {list(tensor.shape)}\n"
                digest.update(header.encode())
                values = tensor.detach().cpu().contiguous().reshape(-1)
                digest.update(values.view(torch.uint8).numpy().data)
                has_weights = True
    return digest.hexdigest() if has_weights else None


def _modules(model: object) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, nn.Module):
        yield "", model
        return
    if inspect.ismethod(model):
        yield from _modules(model.__self__)
        return
    names = dict(vars(model)) if hasattr(model, "__dict__") else {}
    if inspect.isfunction(model):
        used = inspect.getclosurevars(model)
        names = {**used.globals, **used.nonlocals}
    for name, value in sorted(names.items()):
        if isinstance(value, nn.Module):
            yield name, value
