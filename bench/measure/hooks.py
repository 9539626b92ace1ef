"""Where a recorder listens in torch: hooks of modules and optimisers, and functions that are called
around backward passes, collectives, checkpoints and the loading of batches.

A hook returns None and changes nothing. Outermost modules are found by torch's hooks of all
modules in the first steps; then only these have hooks, for a hook of all modules would cost each
of them a microsecond or two.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_loaders

if TYPE_CHECKING:
    from fuelrail.bench.measure.recorder import Recorder

_SEARCHED_STEPS: Final = 3
"""Steps in which outermost modules are looked for; and again when a step has no forward pass."""
_MAX_MODULES: Final = 32
_MAX_SEARCHES: Final = 8

_COLLECTIVES: Final = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


_READS: Final = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__")
"""Methods of a tensor for whose values the host waits for the device."""


class Batches:
    """An iteration over a loader; it keeps no batch, so that none lives longer than without it."""

    def __init__(
        self,
        iterate: Callable[[], Iterator[Any]],
        recorder: Recorder,
        on_ask: Callable[[], None],
    ) -> None:
        self._recorder = recorder
        self._on_ask = on_ask
        with recorder.phase("data_wait"):  # workers start
            self._batches = iterate()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self._on_ask()
        return _take_batch(self._recorder, self._batches, next)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # while this object is being unpickled
            raise AttributeError(name)
        return getattr(self._batches, name)


def _take_batch(recorder: Recorder, iterator: Any, take: Callable[[Any], Any]) -> Any:
    """Return an iterator's next batch, and note when the loop asked for it, and when it came."""
    batch = None
    recorder.ask(iterator)
    try:
        batch = take(iterator)
        return batch
    finally:
        recorder.got(batch)


class ModuleHook:
    """A hook of a module, which is not in copies and pickles of it."""

    def __init__(self, recorder: Recorder, call: Callable[..., None]) -> None:
        self._recorder = recorder
        self._call = call

    def __call__(self, module: nn.Module, *args: Any) -> None:
        """Call it, unless the module is being compiled."""
        if not torch.compiler.is_compiling():
            self._recorder.call(self._call, module, *args)

    def __reduce__(self) -> Any:
        # A checkpoint of a whole module needs a hook, and no part of this package: one of Python's
        # own functions that take any arguments and return None.
        return getattr, (contextlib.nullcontext(), "__exit__")


class Hooks:
    """All hooks of one recorder.

    Args:
        recorder: what they call.
        models: modules whose calls are forward passes; empty: they are looked for.
        optimizer: the one whose steps count; None: all.
        has_loaders: whether torch's loaders say when the loop asks for a batch.
        on_ask: called with a loader before it is asked for a batch, where ``has_loaders``.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        models: Iterable[nn.Module] = (),
        optimizer: Any = None,
        has_loaders: bool = False,
        on_ask: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._recorder = recorder
        # A trainer's wrapper, such as Accelerate's, has the optimiser that torch knows inside.
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        self._removals = contextlib.ExitStack()
        self._search = contextlib.ExitStack()
        self._on_ask = on_ask
        self._loaders = weakref.WeakKeyDictionary[Any, Any]()
        self._modules = weakref.WeakSet[nn.Module]()
        self._is_searching = False
        self._num_searches = 0
        self._sizes: dict[int, int] = {}
        self._depth = 0
        self._searches_until = _SEARCHED_STEPS
        for model in models:
            self._listen_to(model)
        if not self._modules:
            self._start_search()

        def before_update(optimizer: Any, *_: Any) -> None:
            if self._optimizer in (None, optimizer):
                recorder.enter("optimiser")

        def after_update(optimizer: Any, *_: Any) -> None:
            if self._optimizer in (None, optimizer):
                recorder.call(self._end_update)

        for handle in (
            register_optimizer_step_pre_hook(before_update),
            register_optimizer_step_post_hook(after_update),
        ):
            self._removals.callback(handle.remove)
        self._replace(torch.autograd, "backward", self._go_backward)
        self.listen(torch, "save", "checkpoint")
        self.listen(logging.Logger, "handle", "logging")
        self._replace(nn.Module, "train", self._set_mode)
        if dist.is_available():
            for name in _COLLECTIVES:
                self.listen(dist, name, "all_reduce")
            self.listen(dist.Work, "wait", "all_reduce")
        if has_loaders:
            self.listen(DataLoader, "__iter__", "iterator")
            self.listen(torch_loaders._BaseDataLoaderIter, "__next__", "batch")  # noqa: SLF001
        gc.callbacks.append(recorder.collected)
        self._removals.callback(gc.callbacks.remove, recorder.collected)

    @property
    def modules(self) -> list[nn.Module]:
        """Modules whose calls are forward passes."""
        return list(self._modules)

    def remove(self) -> None:
        """Leave torch as it was."""
        self._search.close()
        self._removals.close()

    def listen(self, owner: Any, name: str, role: str) -> None:
        """Note the calls of a function.

        ``role``: the phase that they are; "iterator", a loader makes one that says itself when it
        is asked for a batch; "batches", it makes another one; "batch", an iterator gives one.
        """
        roles = {"iterator": self._make_iterator, "batches": self._iterate, "batch": self._next}
        self._replace(owner, name, roles.get(role) or functools.partial(self._call_in_phase, role))

    def call_before(self, owner: Any, name: str, call: Callable[[], Any]) -> None:
        """Make a call before each call of a function."""

        def call_both(original: Any, /, *args: Any, **kwargs: Any) -> Any:
            call()
            return original(*args, **kwargs)

        self._replace(owner, name, call_both)

    def _replace(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Have ``call`` called in place of a function, with it and its arguments."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        def restore() -> None:
            if getattr(owner, name) is wrapped:  # and nobody has wrapped it since
                setattr(owner, name, original)

        setattr(owner, name, wrapped)
        self._removals.callback(restore)

    def _call_in_phase(self, phase: str, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._recorder.is_recording:
            return original(*args, **kwargs)
        with self._recorder.phase(phase):
            return original(*args, **kwargs)

    def _go_backward(self, original: Any, /, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # Before what waits for other ranks, the last gradient is computed.
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
        has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        has_ranks &= not torch.compiler.is_compiling() and isinstance(roots, tuple | list)
        root = next((entry for entry in roots if entry.requires_grad), None) if has_ranks else None

        def note(_: torch.Tensor) -> None:
            # The engine's own list of what to do at the end, in which DDP's wait comes later.
            engine = torch.autograd.Variable._execution_engine  # noqa: SLF001
            engine.queue_callback(self._recorder.gradients_done)

        handle = None if root is None else root.register_hook(note)
        try:
            return self._call_in_phase("backward", original, tensors, *args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()

    def _read(self, original: Any, /, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not tensor.is_cuda:
            return original(tensor, *args, **kwargs)
        asked_ns = time.monotonic_ns()
        value = original(tensor, *args, **kwargs)
        self._recorder.synced(time.monotonic_ns() - asked_ns)
        return value

    def _set_mode(self, original: Any, /, module: nn.Module, mode: bool = True) -> Any:
        # Evaluation may call another module, such as a copy with averaged weights.
        if not mode and module not in self._modules and not self._is_searching:
            self._recorder.call(self._start_search)
        return original(module, mode)

    def _iterate(self, original: Any, /, loader: Any) -> Any:
        self._recorder.note_workers(loader)
        return Batches(lambda: original(loader), self._recorder, lambda: self._on_ask(loader))

    def _make_iterator(self, original: Any, /, loader: Any) -> Any:
        self._recorder.note_workers(loader)
        with self._recorder.phase("data_wait"):  # workers start
            iterator = original(loader)
        self._loaders[iterator] = loader
        return iterator

    def _next(self, original: Any, /, iterator: Any) -> Any:
        self._on_ask(self._loaders.get(iterator))
        return _take_batch(self._recorder, iterator, original)

    def _end_update(self) -> None:
        recorder = self._recorder
        recorder.leave()
        recorder.updated()
        if recorder.num_steps >= self._searches_until:
            self._end_search()
        is_lost = not recorder.has_forward and not self._is_searching
        if is_lost and self._num_searches < _MAX_SEARCHES:
            self._searches_until = recorder.num_steps + _SEARCHED_STEPS
            self._num_searches += 1
            self._start_search()

    def _end_search(self) -> None:
        self._search.close()
        self._is_searching = False

    def _start_search(self) -> None:
        """Look for outermost modules among all that are called."""
        recorder = self._recorder
        self._search.close()
        self._depth = 0
        self._is_searching = True

        def before(module: nn.Module, _: Any) -> None:
            if torch.compiler.is_compiling() or not recorder.is_idle:
                return
            if self._depth == 0 and module not in self._modules:
                recorder.call(self._listen_to, module)
                recorder.call(self._begin, module)  # in this call its own hook comes too late
            self._depth += 1
            if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:  # noqa: SLF001
                # Compiled with hooks of all modules it would be compiled again without them.
                self._end_search()

        def after(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._depth = max(0, self._depth - 1)

        # Torch warns of hooks of all modules where one of them is compiled; see above.
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are")
        self._search.callback(register_module_forward_pre_hook(before).remove)
        self._search.callback(register_module_forward_hook(after, always_call=True).remove)

    def _begin(self, module: nn.Module, *_: Any) -> None:
        is_training = module.training and torch.is_grad_enabled()
        # DDP sends its buffers to all ranks before the module in it is called.
        is_broadcast = isinstance(module, nn.parallel.DistributedDataParallel)
        self._recorder.begin_forward(is_training, is_broadcast=is_broadcast)

    def _listen_to(self, module: nn.Module) -> None:
        """Note the calls of a module; those of another one inside it are a part of them."""
        recorder = self._recorder
        if len(self._modules) >= _MAX_MODULES:
            return
        self._modules.add(module)
        for parameter in module.parameters():
            self._sizes[id(parameter)] = parameter.numel()
            if parameter.is_cuda and recorder.device is None:
                recorder.use_device(parameter.device)
                for name in _READS:
                    self._replace(torch.Tensor, name, self._read)
        recorder.num_parameters = sum(self._sizes.values())
        before = ModuleHook(recorder, self._begin)
        after = ModuleHook(recorder, lambda *_: recorder.end_forward())
        handles = [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),
        ]
        if isinstance(module, nn.parallel.DistributedDataParallel):
            synced = ModuleHook(recorder, lambda *_: recorder.end_broadcast())
            handles.append(module.module.register_forward_pre_hook(synced, prepend=True))
            self._listen_to(module.module)  # which evaluation often calls
        for handle in handles:
            self._removals.callback(handle.remove)
