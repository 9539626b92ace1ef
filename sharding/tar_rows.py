"""The samples of plain tars by number, where they lie: our order over WebDataset's tars, without
resharding.

::

    rows = TarRows("tars", transform=decode)
    order = fr.OrderSpec(kind="windowed", window=4, seed=7)  # four tars at a time
    sampler = fr.order.BatchSampler(len(rows), order, blocks=rows.blocks, global_batch=64)
    loader = torch.utils.data.DataLoader(rows, batch_sampler=sampler, num_workers=8)
    for batch in sampler.count(loader): ...
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.webdataset import WebDataset

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I32, I64
    from fuelrail.sharding.sources.shared.files import SourceFiles

_MOST_SAMPLE_BYTES: Final = 512 << 20


class TarRows:
    """Samples of a folder of plain tars, a tar, or a URL, as a map-style dataset.

    An item is what ``webdataset.WebDataset`` gives before it decodes: a dict of ``__key__`` and the
    bytes of each member by extension. ``transform`` gets the dict, and what it returns is the item.
    Samples are in the order of the tars' names. One range of one tar is read for each item.

    The headers of all tars are read here, once, in up to 0.1 ms a member. The object can be
    sent to other processes, each of which opens the tars itself.

    Raises SourceError for a tar that is damaged, cut off, compressed, or goes on behind its end
    (``ignore_zeros`` reads on there), for a key that comes again, and, from an item, where a tar
    has changed since. ``noted`` counts what was left out, such as members without a key.
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
        transform: Callable[[dict[str, Any]], Any] | None = None,
        *,
        ignore_zeros: bool = False,
    ) -> None:
        self._location = os.fspath(location)
        self._transform = transform
        self.noted: Counter[str] = Counter()
        source = WebDataset(self._location, {"ignore_zeros": ignore_zeros})
        if source.reads == "clip":
            raise SourceError(
                f"'{source.files.shown}' has compressed tars, of which no single sample can be "
                "read; unpack them, or run `fuelrail shard webdataset:...`"
            )
        tar_numbers: dict[str, int] = {}
        extension_numbers: dict[str, int] = {}
        keys: list[str] = []
        tars: list[int] = []
        extensions: list[int] = []
        offsets: list[int] = []
        lengths: list[int] = []
        starts = [0]
        for sample in source.iter_samples(self.noted):
            keys.append(sample.key)
            tars.append(tar_numbers.setdefault(sample.tar, len(tar_numbers)))
            for extension, member in sample.members.items():
                number = extension_numbers.setdefault(extension, len(extension_numbers))
                extensions.append(number)
                offsets.append(member.offset)
                lengths.append(member.length)
            starts.append(len(offsets))
        if not keys:
            raise SourceError(f"'{source.files.shown}' has no tars with samples")
        self.keys: list[str] = keys
        """The key of each row."""
        self.blocks: list[int] = np.bincount(tars).tolist()
        """The number of rows of each tar, for an order of kind ``windowed``."""
        self._tar_names = list(tar_numbers)
        self._stamps = [self._stamp(source.files, tar) for tar in self._tar_names]
        self._tars: I32 = np.array(tars, np.int32)
        self._extension_names = list(extension_numbers)
        self._extensions: I32 = np.array(extensions, np.int32)
        self._offsets: I64 = np.array(offsets, np.int64)
        self._lengths: I64 = np.array(lengths, np.int64)
        self._starts: I64 = np.array(starts, np.int64)
        self._files = source.files
        self._process = os.getpid()
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, row: int) -> Any:
        row = range(len(self))[row]
        if self._process != os.getpid():  # connections do not survive a fork
            self._open()
        tar = int(self._tars[row])
        name = self._tar_names[tar]
        if tar not in self._checked:
            if self._stamp(self._files, name) != self._stamps[tar]:
                raise SourceError(
                    f"tar '{self._files.shown}/{name}' has changed since its headers were read; "
                    "make TarRows again, and begin the run again"
                )
            self._checked.add(tar)
        members = slice(*self._starts[row : row + 2])
        offsets = self._offsets[members]
        ends = offsets + self._lengths[members]
        begin = int(offsets.min())
        num_bytes = int(ends.max()) - begin
        data = self._files.read(
            name,
            offset=begin,
            length=num_bytes,
            limit=_MOST_SAMPLE_BYTES,
        )
        if len(data) != num_bytes:
            raise SourceError(
                f"tar '{self._files.shown}/{name}' ends at byte {begin + len(data)}, in the "
                f"middle of '{self.keys[row]}'; it has changed since its headers were read"
            )
        item: dict[str, Any] = {"__key__": self.keys[row]}
        for number, first, last in zip(
            self._extensions[members],
            offsets - begin,
            ends - begin,
            strict=True,
        ):
            item[self._extension_names[number]] = data[first:last]
        if self._transform is None:
            return item
        return self._transform(item)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out open files."""
        return {name: value for name, value in vars(self).items() if name != "_files"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the files anew."""
        vars(self).update(state)
        self._open()

    def _open(self) -> None:
        self._files = WebDataset(self._location, {}).files
        self._process = os.getpid()
        self._checked = set()

    @staticmethod
    def _stamp(files: SourceFiles, tar: str) -> tuple[int, str] | None:
        facts = files.facts(tar)
        if facts is None:
            return None
        return facts.num_bytes, facts.stamp
