"""How batches are made: the stages from a sample's bytes to a batch on its device, and the buffers they share."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fuelrail.loaders import hooks, work
from fuelrail.loaders.assemble import assemble
from fuelrail.loaders.autotune import decode_ahead
from fuelrail.loaders.batch_decode import BatchDecode
from fuelrail.loaders.decode import BatchDecoder
from fuelrail.loaders.nvtx import with_ranges
from fuelrail.pipeline.stages import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fuelrail.loaders.assemble import BoxFrame
    from fuelrail.loaders.autotune import Tuning
    from fuelrail.loaders.decode import ImageDecoder
    from fuelrail.loaders.normalize import Normalize
    from fuelrail.loaders.quarantine import BadSamples
    from fuelrail.loaders.transfer import CudaTransfer
    from fuelrail.pipeline.manifest import LidarEntry
    from fuelrail.pipeline.windows import FrameWindow


class Production(NamedTuple):
    """What a loader's stages are made of; ``lidar`` is the one whose sweeps become ``points``."""

    bad: BadSamples
    cameras: tuple[str, ...]
    lidar: LidarEntry | None
    augments: work.Augments
    decoder: ImageDecoder | BatchDecoder
    batch_size: int
    window: FrameWindow | None
    transform: Callable[[dict[str, Any]], Any] | None
    collate_fn: Callable[[list[Any]], Any] | None
    normalize: Normalize | None
    transfer: CudaTransfer | None
    box_frame: BoxFrame

    def stages(self, tuning: Tuning) -> list[Stage]:
        """The stages under a tuning; another tuning changes their numbers of threads and capacities only."""
        num_workers = tuning.num_workers
        parse = partial(work.parse, self.augments, self.bad, self.window)
        fill = self.augments.pixels.grid_mask_fill
        stages = [
            Stage("fetch", partial(work.fetch, self.bad), 1, 2 * num_workers),
            # Putting sweeps together is real work, most of it without the interpreter's lock.
            Stage("parse", parse, num_workers if self.augments.accumulation else 1, 2 * num_workers),
        ]
        group: int | None = self.batch_size
        if isinstance(self.decoder, BatchDecoder):
            decode_all = BatchDecode(self.decoder, self.cameras, fill, self.bad, parse)
            if self.decoder.device.type == "cpu":
                stages.append(Stage("decode", decode_all, 1, 1, group=group))
            else:
                # Two threads: while one waits for its pictures, the other parses headers and feeds the next batch.
                stages += [Stage("gather", list, 1, 1, group=group), Stage("decode", decode_all, 2, 1)]
            group = None  # from here on the items are batches
        else:
            decode_one = partial(work.decode, self.decoder, self.cameras, fill, self.bad, parse)
            stages.append(Stage("decode", decode_one, num_workers, decode_ahead(num_workers, self.batch_size)))
        if self.transform is None and self.collate_fn is None:
            assembled = partial(assemble, lidar=self.lidar, box_frame=self.box_frame)
            collate = partial(_rechecked, self.bad, assembled)
        else:
            transform = partial(
                hooks.transform, self.transform, lidar=self.lidar, seed=self.augments.seed, box_frame=self.box_frame
            )
            each = partial(_transformed, self.bad, transform)
            each = each if group else partial(work.for_each, each)
            stages.append(Stage("transform", each, num_workers, self.batch_size if group else 1))
            collate = partial(hooks.collate, self.collate_fn)
        stages.append(Stage("collate", collate, 1, tuning.ready, group=group))
        if self.normalize is not None and self.transfer is None:
            stages.append(Stage("normalize", self.normalize, 1, tuning.ready))
        if self.transfer is not None:
            stages.append(Stage("transfer", self.transfer, 1, tuning.ready))
            return [with_ranges(stage) for stage in stages]
        return stages


def _rechecked(bad: BadSamples, function: Callable[[Sequence[Any]], Any], decoded: Sequence[Any]) -> Any:  # noqa: ANN401
    """What becomes of decoded samples, once it is sure that their bytes did not change while they were read."""
    try:
        made = function(decoded)
    except Exception:
        bad.recheck(decoded)  # an error that explains this one
        raise
    bad.recheck(decoded)
    return made


def _transformed(bad: BadSamples, function: Callable[[Any], Any], decoded: Any) -> Any:  # noqa: ANN401
    return _rechecked(bad, lambda samples: function(samples[0]), (decoded,))
