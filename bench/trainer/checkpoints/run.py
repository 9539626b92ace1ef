"""The checkpoints of a run as its settings ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.trainer.checkpoints.saver import Checkpoints
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.measure.records import RankWriter
    from fuelrail.bench.trainer.settings import TrainSettings
    from fuelrail.bench.trainer.strategies.parallel import Parallel
    from fuelrail.loaders import DataLoader


class RunCheckpoints:
    """Restores the newest checkpoint when made, then saves one every N steps and one at the end.

    Without a place for checkpoints, or a loader, it does nothing. ``first_step`` is the number of steps that were done
    before. Raises what :meth:`Checkpoints.restore` raises, and ConfigError where no step is left to do.
    """

    def __init__(
        self, settings: TrainSettings, parallel: Parallel, loader: DataLoader | None, writer: RankWriter
    ) -> None:
        self.first_step = self._saved_step = 0
        self._parallel, self._loader, self._writer, self._every = parallel, loader, writer, settings.every
        self._saver: Checkpoints | None = None
        if settings.checkpoint is None or loader is None:
            return
        identity = {"model": settings.model_name, "optimiser": settings.parallel.optimiser}
        self._saver = Checkpoints(settings.checkpoint, keep=settings.keep, identity=identity)
        restored = self._saver.restore(parallel, loader)
        if restored is None:
            return
        self.first_step = self._saved_step = restored.step
        writer.write(restored)
        if settings.num_steps is not None and restored.step >= settings.num_steps:
            raise ConfigError(
                f"the run is complete: checkpoint {restored.folder} is at step {restored.step} of "
                f"{settings.num_steps}; use more steps, or another --checkpoint to start again"
            )

    def after(self, num_steps: int) -> None:
        """Note that this number of steps is done, those before the run included."""
        if (num_steps - self._saved_step) >= self._every:
            self._save(num_steps)

    def close(self, num_steps: int) -> None:
        """Save the last state, if that is not saved, and wait until it is visible."""
        if self._saver is None:
            return
        if num_steps > self._saved_step:
            self._save(num_steps)
        done = self._saver.close()
        if done is not None:
            self._writer.write(done)

    def _save(self, num_steps: int) -> None:
        if self._saver is None or self._loader is None:
            return
        done = self._saver.save(num_steps, self._parallel, self._loader.state_dict())
        if done is not None:
            self._writer.write(done)
        self._saved_step = num_steps
