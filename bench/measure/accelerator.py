"""The accelerator of a training step: phases with measured device time.

Without a GPU it is the CPU, or an emulated one, of which the rest of this text is.

The emulated accelerator follows MLPerf Storage: a step occupies the device for its published time
while the host is free to load. The host sleeps through that time, it doesn't burn a core that the
loader could use. Inside the phases a stand-in model really runs on the CPU, so gradients and
all-reduces are true. Real and emulated time combine so:

- A phase is the emulated time. Where the stand-in's real work takes longer, the surplus is recorded
  as overrun; it and late wake-ups belong to no phase, so they are part of the step's ``other``
  time, as a host that is too slow is.
- Busy time is the emulated time alone. An overrun, a late wake-up or a straggling all-reduce can
  therefore only lower occupancy, never raise it; the report warns when overruns are more than
  noise.
- A GPU works through queued kernels without waiting for the host to wake up. So within one
  micro-batch the emulated phases follow each other on the device's own timeline: backward starts at
  the instant at which emulated forward ended, even if the sleeping host woke 80 us later. Forward
  starts when the batch is on the device.
- Gradients become ready as they would on the device: a DDP bucket that completes a share f of all
  gradient bytes is held until f of the emulated backward has passed; then its real all-reduce
  starts and overlaps the rest. What is still under way when the emulated backward ends is the
  exposed all-reduce.
- Copies to the device aren't emulated: the host-to-device time is what the host measured.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from fuelrail.bench.measure.clock import NS_PER_MS, Clock
from fuelrail.bench.measure.recorder import Recorder
from fuelrail.bench.measure.records import PHASES, DeviceTimes, StepRecord
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Settings, load_yaml

# `configs/` is beside `bench/` in a checkout (whose package is a link: so resolve) and in an
# installed package.
PROFILES = Path(__file__).resolve().parents[2] / "configs" / "accelerators"
DEFAULT_PROFILE = "bevdet-r50-704x256-a100"

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(gt=0)]


class ReferenceInput(Settings, frozen=True):
    """The input that a profile's times hold for."""

    cameras: Count
    height: Count
    width: Count


class AcceleratorProfile(Settings, frozen=True):
    """Published step time of one network on one device, split into phases.

    ``forward_ms`` and ``backward_ms`` are for one ``per`` (a sample with all its cameras, or an
    image) and grow in proportion to the rank's batch; ``optimiser_ms`` is for a step.
    ``train_gflop`` is the arithmetic of training on one unit, a multiply-add counted as two, where
    it is known; ``peak_tflops`` the device's dense peak in the precision of the times.
    """

    name: str
    device: str
    network: str
    per: Literal["sample", "image"]
    reference_input: ReferenceInput
    forward_ms: Positive
    backward_ms: Positive
    optimiser_ms: Positive
    sources: list[str]
    derivation: str
    train_gflop: Positive | None = None
    peak_tflops: Positive | None = None

    def step_ms(self, num_samples: float, num_images: float) -> float:
        """Return the device time of one step over the given rank's batch, in milliseconds."""
        units = num_samples if self.per == "sample" else num_images
        return units * (self.forward_ms + self.backward_ms) + self.optimiser_ms


class Accelerator:
    """Phases of a training step, each of which is as long as it takes: on the host's CPUs, by the
    clock of the thread that trains, or on a GPU, by events on its compute stream.

    The trainer calls them in this order, the first three once for each micro-batch.
    ``gradients_ready`` and the two ``all_reduce_*`` calls come from DDP's communication hook,
    inside ``backward``. ``recorder`` makes the record of a step.
    """

    torch_device = "cpu"

    def __init__(self, clock: Clock | None = None) -> None:
        self.recorder = Recorder(None)
        self._clock = clock or Clock()
        self._times = DeviceTimes()  # what the recorder does not measure, or not as it counts
        # All-reduces end in a thread of the communication library.
        self._in_flight_lock = threading.Lock()
        self._in_flight = 0
        self._in_flight_since_ns = 0

    def host_to_device(self) -> AbstractContextManager[None]:
        """Surround the copy of a batch; when it ends the batch may be used by ``forward``."""
        return self.recorder.phase("host_to_device")

    def forward(self, num_samples: float, num_images: float) -> AbstractContextManager[None]:  # noqa: ARG002
        """Surround the forward pass of a rank's (micro-)batch; a pipeline's stage counts parts
        of samples.
        """
        return self.recorder.phase("forward")

    def backward(self) -> AbstractContextManager[None]:
        """Surround the backward pass: up to the last local gradient, and from there the exposed
        all-reduce.
        """
        return self.recorder.phase("backward")

    def optimiser(self) -> AbstractContextManager[None]:
        """Surround the optimiser's step."""
        return self.recorder.phase("optimiser")

    def gradients_ready(self, share: float) -> None:
        """Note that local gradients that make up ``share`` (0 to 1) of all gradient bytes are
        computed.
        """
        if share >= 1.0:
            self.recorder.gradients_done()

    def all_reduce_started(self) -> None:
        """Note that one bucket's all-reduce is about to be queued: open the interval of the total
        all-reduce unless one is open.
        """
        with self._in_flight_lock:
            if self._in_flight == 0:
                self._in_flight_since_ns = self._clock.now_ns()
            self._in_flight += 1

    def all_reduce_finished(self) -> None:
        """Record that one bucket's all-reduce is complete; thread-safe."""
        with self._in_flight_lock:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._times.all_reduce_total_ns += self._clock.now_ns() - self._in_flight_since_ns

    def finish_step(self) -> StepRecord:
        """Wait for the device and return the step's record; the next step starts afresh."""
        record = self.recorder.take_step()
        record.all_reduce_total_ns = self._times.all_reduce_total_ns
        self._times = DeviceTimes()
        return record


class EmulatedAccelerator(Accelerator):
    """An accelerator that is busy for a profile's published time; see the module's docstring."""

    def __init__(self, profile: AcceleratorProfile, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.profile = profile
        self._units = 0.0
        self._free_at_ns = 0  # when the emulated device has worked through all that was given to it
        self._backward_start_ns = 0
        self._gradients_at_ns = 0  # time of the last local gradient; 0 before
        self._held_ns = 0  # waits inside backward, which are no work of the stand-in

    @contextmanager
    def forward(self, num_samples: float, num_images: float) -> Iterator[None]:
        """Occupy the device from now on for the batch's forward time."""
        self._units = num_samples if self.profile.per == "sample" else num_images
        start_ns = self._free_at_ns = self._clock.now_ns()
        yield
        self._times.stand_in_ns += self._clock.now_ns() - start_ns
        self._times.forward_ns += self._occupy(self._units * self.profile.forward_ms)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Occupy the device for the backward time; the all-reduce overlaps it as it would on the
        device.
        """
        self._backward_start_ns = self._free_at_ns
        self._gradients_at_ns = 0
        self._held_ns = 0
        start_ns = self._clock.now_ns()
        yield
        device_ms = self._units * self.profile.backward_ms
        end_ns = self._clock.now_ns()
        if not self._gradients_at_ns:  # no all-reduce in this backward: one rank, or accumulating
            self._times.stand_in_ns += end_ns - start_ns
            self._times.backward_ns += self._occupy(device_ms)
            return
        self._times.stand_in_ns += max(0, self._gradients_at_ns - start_ns - self._held_ns)
        self._times.backward_ns += round(device_ms * NS_PER_MS)
        self._times.device_busy_ns += round(device_ms * NS_PER_MS)
        self._times.all_reduce_ns += end_ns - self._gradients_at_ns
        self._free_at_ns = end_ns

    @contextmanager
    def optimiser(self) -> Iterator[None]:
        """Occupy the device for the optimiser's time."""
        start_ns = self._clock.now_ns()
        yield
        self._times.stand_in_ns += self._clock.now_ns() - start_ns
        self._times.optimiser_ns += self._occupy(self.profile.optimiser_ms)

    def gradients_ready(self, share: float) -> None:
        """Hold the bucket until the emulated device has computed ``share`` of the gradients."""
        due_ns = self._backward_start_ns + round(
            self._units * self.profile.backward_ms * NS_PER_MS * share
        )
        ready_ns = self._clock.now_ns()
        lateness_ns = self._clock.wait_until(due_ns)
        if ready_ns < due_ns:
            self._held_ns += due_ns - ready_ns + lateness_ns
            self._times.overshoot_ns += lateness_ns
        if share >= 1.0:
            # With a late wake-up, which must not look like a slow all-reduce.
            self._gradients_at_ns = max(due_ns + lateness_ns, ready_ns)
            self._times.overrun_ns += max(0, ready_ns - due_ns)

    def finish_step(self) -> StepRecord:
        """Return the step's record, with the device's phases; all else is the host's."""
        times = self._times
        record = super().finish_step()
        times.host_to_device_ns = record.host_to_device_ns
        for name in DeviceTimes.__struct_fields__:
            setattr(record, name, getattr(times, name))
        record.other_ns += record.wall_ns - sum(record.phase_ns(phase) for phase in PHASES)
        return record

    def _occupy(self, busy_ms: float) -> int:
        """Wait for a phase queued on the device's timeline; return the device's own time for it,
        in ns.
        """
        start_ns = self._free_at_ns
        device_ns = round(busy_ms * NS_PER_MS)
        real_end_ns = self._clock.now_ns()
        self._free_at_ns = max(start_ns + device_ns, real_end_ns)
        self._times.device_busy_ns += device_ns
        if real_end_ns > start_ns + device_ns:
            self._times.overrun_ns += real_end_ns - start_ns - device_ns
        else:
            self._times.overshoot_ns += self._clock.wait_until(self._free_at_ns)
        return device_ns


def profile_names() -> list[str]:
    """Return names of the profiles that come with Fuelrail."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def load_profile(name: str) -> AcceleratorProfile:
    """Load a profile by its name among ours, or from a path ending in ``.yaml``.

    Raises ConfigError.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else PROFILES / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"accelerator profile '{name}' is not there; known profiles: "
            f"{', '.join(profile_names())}; or give the path of a .yaml file of the same form"
        )
    return load_yaml(path, AcceleratorProfile)
