"""Two CUDA devices in host memory, whose streams are checked: every access must happen after what it depends on.

Tensors of the fake devices are tensors over host memory that report a CUDA device. Each operation on them runs at
once, and is noted as a kernel of the calling thread's current stream. Each stream has a vector clock; events, waits of
streams for each other, and waits of the host move knowledge between the clocks as CUDA's rules say. Three things are
findings, with the operations concerned:

- a kernel reads or writes a tensor that a kernel of another stream has written (or, for a write, read), and nothing
  orders the two;
- memory goes back to the allocator while a kernel of another stream than the allocating one may still use it:
  ``record_stream`` was not called there, and nothing waits;
- pinned memory changes before the copy to the device that reads it is known to be complete.

The host is one actor: what one of its threads has waited for, all know. Findings that would need a thread to overtake
another one's wait are therefore not made; there are no false ones. Like torch's, the fake refuses operations on tensors
of different devices.
"""

from __future__ import annotations

import threading
import types
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch.utils import _pytree as pytree

from support.fake_streams import Access, Block, FakeEvent, FakeStream, join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

    from support.fake_streams import Clock
_MAY_MIX = {
    "copy_",
    "index",
    "index_put_",
    "_index_put_impl_",
    "_to_copy",
    "index_put",
}
_HOST_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "masked_select",
    "is_nonzero",
    "unique_consecutive",
}
_FACTORIES = (
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "tensor",
    "as_tensor",
    "rand",
    "randn",
    "eye",
    "empty_strided",
)
_MADE_ON_HOST = {"tensor", "as_tensor"}


class Copy(NamedTuple):
    """One copy from the host to a device."""

    num_bytes: int
    is_pinned: bool
    waits: bool
    operation: str


class DeviceTensor(torch.Tensor):
    """A tensor over host memory that reports a CUDA device."""

    fake: FakeCuda
    block: Block
    home: torch.device

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:
        return self.home

    @property
    def is_cuda(self) -> bool:
        return True

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.dtype} {list(self.shape)} on {self.home})"

    def record_stream(self, stream: FakeStream) -> None:
        self.block.recorded.add(stream.stream_id)

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.fake.dispatch(func, args, kwargs or {})


class FakeGenerator(torch.Generator):
    """A generator of random numbers in host memory for a device of any name; factories take it for that device."""

    def __new__(cls, device: Any = "cpu") -> Self:
        generator = super().__new__(cls)
        generator.home = torch.device(device)
        return generator


class FakeCuda:
    """The devices; use as a context manager, which ends with an AssertionError if there are findings."""

    def __init__(self, patch: pytest.MonkeyPatch, num_devices: int = 2) -> None:
        self.findings: list[str] = []
        self.copies: list[Copy] = []
        self.pinned_bytes = 0
        self.host: Clock = {}
        self.streams: list[FakeStream] = []
        self._num_devices = num_devices
        self._lock = threading.RLock()
        self._local = threading.local()
        self._pinned: list[torch.Tensor] = []
        self._registered: dict[int, int] = {}
        self._pending: list[tuple[Access, torch.Tensor, int]] = []
        self._foreign: dict[int, list[Access]] = {}
        self._is_over = False
        FakeStream.fake = FakeEvent.fake = DeviceTensor.fake = self
        self._defaults = [FakeStream(torch.device("cuda", index)) for index in range(num_devices)]
        self._install(patch)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: object,
    ) -> None:
        self.finish()
        if kind is None and self.findings:
            raise AssertionError("\n".join(self.findings))

    def finish(self) -> list[str]:
        """Wait for everything, stop watching, and return the findings."""
        with self._lock:
            self._synchronize()
            self._is_over = True
        return self.findings

    # What the product calls in the place of torch's.

    def device(self, device: Any = None) -> torch.device:
        """Return the device with its number."""
        if isinstance(device, int):
            return torch.device("cuda", device)
        parsed = torch.device("cuda" if device is None else device)
        return torch.device("cuda", self._device_index()) if str(parsed) == "cuda" else parsed

    def current_stream(self, device: Any = None) -> FakeStream:
        index = self.device(device).index
        streams: dict[int, FakeStream] = getattr(self._local, "streams", {})
        return streams.get(index, self._defaults[index])

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = dict(getattr(self._local, "streams", {}))
        device_index = self._device_index()
        self.set_stream(stream)
        try:
            yield
        finally:
            self._local.streams = before
            self._local.index = device_index

    def set_stream(self, stream: FakeStream) -> None:
        self._local.streams = {
            **getattr(self._local, "streams", {}),
            stream.device_index: stream,
        }
        self._local.index = stream.device_index

    def host_learns(self, clock: Clock) -> None:
        """The host has waited for all that the clock counts."""
        with self._lock:
            join(self.host, clock)
            waiting = self._pending
            self._pending = []
            for access, source, digest in waiting:
                if self.host.get(access.stream.stream_id, 0) < access.tick:
                    self._pending.append((access, source, digest))
                elif _digest(source) != digest:
                    self._find(
                        f"pinned memory changed while {access.operation} on {access.stream} was reading it"
                    )

    def to_device(
        self,
        source: torch.Tensor,
        device: torch.device,
        non_blocking: bool,
        operation: str,
    ) -> DeviceTensor:
        """Copy from the host; the source must not change before the copy is known to be complete."""
        with self._lock:
            stream = self.current_stream(device)
            target = self.adopt(source.clone(), device, stream)
            access = self._note(stream, [], [target.block], operation)
            self._copy_began(access, source, non_blocking)
        return target

    def to_host(self, source: DeviceTensor, non_blocking: bool) -> torch.Tensor:
        """Copy to the host; wait unless `non_blocking` is set."""
        with self._lock:
            stream = self.current_stream(source.device)
            self._note(stream, [source.block], [], "a copy to the host")
            if not non_blocking:
                self.host_learns(stream.clock)
        return _plain(source).clone()

    def adopt(
        self, plain: torch.Tensor, device: torch.device, home: FakeStream | None
    ) -> DeviceTensor:
        """Make host memory a device's new block; ``home`` is the stream that it is allocated on, None for foreign."""
        return self._wrap(
            plain,
            device,
            Block(self, home, f"{plain.dtype} {list(plain.shape)}"),
        )

    def released(
        self,
        home: FakeStream | None,
        label: str,
        reads: list[Access],
        writes: list[Access],
        recorded: set[int],
    ) -> None:
        """Return a block to the allocator, which reuses it for the next request on the same stream."""
        with self._lock:
            if home is None or self._is_over:
                return
            for access in (*writes, *reads):
                by_another = access.stream is not home and access.stream.stream_id not in recorded
                if by_another and not self._is_known(access, home):
                    self._find(
                        f"{label}, allocated on {home}, was freed while {access.operation} on {access.stream} runs"
                    )
                    return

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation of torch's with tensors of a device among its arguments."""
        name = func._schema.name.split("::")[1]
        flat = [
            tensor
            for tensor in pytree.tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        ]
        ours = [tensor for tensor in flat if isinstance(tensor, DeviceTensor)]
        device = ours[0].home
        with self._lock:
            foreign = [
                tensor
                for tensor in flat
                if (tensor.device != device) and (tensor.dim() > 0 or tensor.is_cuda)
            ]
            if foreign and name not in _MAY_MIX:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, {name} has {device} and {foreign[0].device}"
                )
            written = _written(func, args, kwargs)
            is_view = any(
                returned.alias_info is not None and not returned.alias_info.is_write
                for returned in func._schema.returns
            )
            with torch._C._DisableTorchDispatch():
                result = func(*args, **kwargs)
            stream = self.current_stream(device)
            blocks = {tensor.untyped_storage().data_ptr(): tensor.block for tensor in ours}
            wrapped = pytree.tree_map_only(
                torch.Tensor,
                lambda tensor: self._out(tensor, device, stream, blocks),
                result,
            )
            outputs = [
                tensor for tensor in pytree.tree_leaves(wrapped) if isinstance(tensor, DeviceTensor)
            ]
            if not is_view:
                targets = [
                    tensor.block
                    for tensor in (*written, *outputs)
                    if isinstance(tensor, DeviceTensor)
                ]
                sources = [tensor.block for tensor in ours if tensor.block not in targets]
                access = self._note(stream, sources, targets, name)
                for tensor in foreign:
                    if not tensor.is_cuda and not any(tensor is target for target in written):
                        self._copy_began(
                            access,
                            tensor,
                            name == "copy_" and (args[2:] == (True,) or kwargs.get("non_blocking")),
                        )
                if name in _HOST_WAITS or any(not tensor.is_cuda for tensor in written):
                    self.host_learns(stream.clock)
        return wrapped

    def _out(
        self,
        tensor: torch.Tensor,
        device: torch.device,
        stream: FakeStream,
        blocks: dict[int, Block],
    ) -> torch.Tensor:
        if isinstance(tensor, DeviceTensor):
            return tensor
        address = tensor.untyped_storage().data_ptr()
        if address and address in blocks:
            return self._wrap(tensor, device, blocks[address])
        return self.adopt(tensor, device, stream)

    def _wrap(self, plain: torch.Tensor, device: torch.device, block: Block) -> DeviceTensor:
        tensor = torch.Tensor._make_subclass(DeviceTensor, plain)
        tensor.home = device
        tensor.block = block
        return tensor

    def _note(
        self,
        stream: FakeStream,
        sources: list[Block],
        targets: list[Block],
        operation: str,
    ) -> Access:
        """A kernel is queued on a stream, after all that the stream and the host know of."""
        for block in sources:
            self._require(block.writes, stream, f"{operation} on {stream} reads", block)
        for block in targets:
            self._require(
                [*block.writes, *block.reads],
                stream,
                f"{operation} on {stream} writes",
                block,
            )
        join(stream.clock, self.host)
        tick = stream.clock.get(stream.stream_id, 0) + 1
        stream.clock[stream.stream_id] = tick
        access = Access(stream, tick, operation)
        for block in sources:
            block.reads.append(access)
        for block in targets:
            block.writes.append(access)
        return access

    def _require(
        self,
        earlier: list[Access],
        stream: FakeStream,
        action: str,
        block: Block,
    ) -> None:
        for access in earlier:
            if not self._is_known(access, stream):
                self._find(
                    f"{action} {block.label} without waiting for {access.operation} on {access.stream}"
                )
                return

    def _is_known(self, access: Access, stream: FakeStream) -> bool:
        number = access.stream.stream_id
        return max(stream.clock.get(number, 0), self.host.get(number, 0)) >= access.tick

    def _copy_began(self, access: Access, source: torch.Tensor, non_blocking: bool) -> None:
        is_pinned = self._is_pinned(source)
        self.copies.append(Copy(source.nbytes, is_pinned, not non_blocking, access.operation))
        if not non_blocking:
            self.host_learns(access.stream.clock)
        elif is_pinned:  # other memory is copied aside before the call returns
            self._pending.append((access, source, _digest(source)))

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        if any(begin <= address < begin + size for begin, size in list(self._registered.items())):
            return True
        return any(
            pinned.data_ptr() <= address < pinned.data_ptr() + max(1, pinned.nbytes)
            for pinned in self._pinned
        )

    def _find(self, text: str) -> None:
        if not self._is_over and text not in self.findings:
            self.findings.append(text)

    def _device_index(self) -> int:
        return int(getattr(self._local, "index", 0))

    def _synchronize(self, device: Any = None) -> None:
        with self._lock:
            for stream in self.streams:
                if device is None or stream.device == self.device(device):
                    self.host_learns(stream.clock)

    def _install(self, patch: pytest.MonkeyPatch) -> None:
        gpu = "NVIDIA H100 80GB HBM3"
        cuda = {
            "Stream": FakeStream,
            "Event": FakeEvent,
            "stream": self.stream,
            "current_stream": self.current_stream,
            "default_stream": lambda device=None: self._defaults[self.device(device).index],
            "set_stream": self.set_stream,
            "synchronize": self._synchronize,
            "is_available": lambda: True,
            "device_count": lambda: self._num_devices,
            "current_device": self._device_index,
            "set_device": lambda device: setattr(self._local, "index", self.device(device).index),
            "_sleep": lambda cycles: self._note(self.current_stream(), [], [], "_sleep"),
            "get_device_name": lambda index=0: gpu,
            "get_device_capability": lambda index=0: (9, 0),
            "get_device_properties": lambda index=0: types.SimpleNamespace(
                uuid=f"{index}",
                name=gpu,
                total_memory=80 << 30,
                major=9,
                minor=0,
            ),
            "mem_get_info": lambda device=None: (40 << 30, 80 << 30),
            "memory_allocated": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "cudart": lambda: types.SimpleNamespace(
                cudaHostRegister=lambda address, size, flags: (
                    self._registered.update({address: size}) or 0
                ),
                cudaHostUnregister=lambda address: self._registered.pop(address) and 0,
            ),
        }
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(
            torch.cuda.nvtx,
            "_nvtx",
            types.SimpleNamespace(rangePushA=lambda name: 0, rangePop=lambda: 0),
        )
        patch.setattr(torch.Tensor, "to", self._tensor_to(torch.Tensor.to))
        patch.setattr(torch.Tensor, "cpu", lambda tensor, **_: tensor.to("cpu"))
        patch.setattr(
            torch.Tensor,
            "cuda",
            lambda tensor, device=None, non_blocking=False: tensor.to(
                self.device(device), non_blocking=non_blocking
            ),
        )
        patch.setattr(
            torch.Tensor,
            "pin_memory",
            lambda tensor, *_: self._pin(tensor.clone()),
        )
        patch.setattr(
            torch.Tensor,
            "is_pinned",
            lambda tensor, *_: self._is_pinned(tensor),
        )
        for name in _FACTORIES:
            patch.setattr(torch, name, self._factory(name, getattr(torch, name)))
        patch.setattr(torch, "Generator", FakeGenerator)
        from_dlpack = self._from_dlpack(torch.utils.dlpack.from_dlpack)
        patch.setattr(torch.utils.dlpack, "from_dlpack", from_dlpack)
        patch.setattr(torch, "from_dlpack", from_dlpack)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._pinned.append(tensor)  # kept, so that its addresses stay its own
            self.pinned_bytes += tensor.nbytes
        return tensor.view_as(tensor)

    def _factory(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            pinned = kwargs.pop("pin_memory", False)
            if device is None or self.device(device).type != "cuda":
                output = function(*args, **kwargs)
                return self._pin(output) if pinned else output
            output = function(*args, **{**kwargs, "device": "cpu"})
            if name in _MADE_ON_HOST:
                return self.to_device(output, self.device(device), False, f"torch.{name}")
            with self._lock:
                stream = self.current_stream(device)
                tensor = self.adopt(output, self.device(device), stream)
                if not name.startswith("empty"):
                    self._note(stream, [], [tensor.block], f"torch.{name}")
            return tensor

        return make

    def _tensor_to(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            copy = kwargs.pop("copy", False)
            if args and isinstance(args[0], torch.Tensor):
                args = (args[0].device, args[0].dtype, *args[1:])
            device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
            target = (
                tensor.device
                if device is None
                else device
                if device.type == "cpu"
                else self.device(device)
            )
            if target == tensor.device:
                options = {} if layout is None else {"memory_format": layout}
                moved = original(tensor, dtype or tensor.dtype, copy=copy, **options)
                assert isinstance(moved, torch.Tensor)
                return moved
            if isinstance(tensor, DeviceTensor):
                host = self.to_host(tensor, non_blocking)
                moved = (
                    host
                    if target.type == "cpu"
                    else self.to_device(host, target, False, "a copy between devices")
                )
            else:
                moved = self.to_device(tensor, target, non_blocking, "a copy to the device")
            return moved if dtype is None else original(moved, dtype)

        return to

    def _from_dlpack(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def from_dlpack(capsule: Any) -> Any:
            plain = original(capsule)
            with self._lock:
                before = self._foreign.get(plain.data_ptr(), [])
                for access in before:
                    if self.host.get(access.stream.stream_id, 0) < access.tick:
                        self._find(
                            f"foreign memory was written again while {access.operation} on {access.stream} reads it"
                        )
                tensor = self.adopt(plain, self.device(), None)
                self._foreign[plain.data_ptr()] = tensor.block.reads
            return tensor

        return from_dlpack


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    written = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written += [
                leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)
            ]
    return written


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        return tensor.as_subclass(torch.Tensor)


def _digest(tensor: torch.Tensor) -> int:
    return zlib.crc32(
        tensor.detach().contiguous().view(torch.uint8).numpy() if tensor.numel() else b""
    )
