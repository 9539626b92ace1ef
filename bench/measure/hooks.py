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
        on_ask: Callable[[], None] = lambda: None,
    ) -> None:
        self._recorder = recorder
        self._on_ask = on_ask
        recorder.enter("data_wait")  # workers start
        try:
            self._batches = iterate()
        finally:
            recorder.leave()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        batch = None
        self._on_ask()
        self._recorder.ask(self._batches)
        try:
            batch = next(self._batches)
        finally:
            self._recorder.got(batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # while this object is being unpickled
            raise AttributeError(name)
        return getattr(self._batches, name)


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
        for handle in (
            register_optimizer_step_pre_hook(
                lambda optimizer, *_: recorder.call(self._before_update, optimizer)
            ),
            register_optimizer_step_post_hook(
                lambda optimizer, *_: recorder.call(self._after_update, optimizer)
            ),
        ):
            self._removals.callback(handle.remove)
        self._replace(torch.autograd, "backward", self._backward)
        self.time_calls(torch, "save", "checkpoint")
        self.time_calls(logging.Logger, "handle", "logging")
        self._replace(nn.Module, "train", self._set_mode)
        if dist.is_available():
            for name in _COLLECTIVES:
                self.time_calls(dist, name, "all_reduce")
            self.time_calls(dist.Work, "wait", "all_reduce")
        if has_loaders:
            self.watch_loader(DataLoader, "__iter__")
            self.watch_loader(torch_loaders._BaseDataLoaderIter, "__next__")  # noqa: SLF001
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

    def time_calls(self, owner: Any, name: str, phase: str) -> None:
        """Count calls of a function as a phase."""
        self._replace(owner, name, self._around(phase))

    def call_before(self, owner: Any, name: str, call: Callable[[], Any]) -> None:
        """Make a call before each call of a function."""

        def wrap(original: Any) -> Any:
            @functools.wraps(original)
            def both(*args: Any, **kwargs: Any) -> Any:
                call()
                return original(*args, **kwargs)

            return both

        self._replace(owner, name, wrap)

    def watch_loader(self, owner: Any, name: str) -> None:
        """Note when a loader makes an iterator, or an iterator a batch.

        ``name``: "__next__"; "__iter__" of a loader whose iterators say themselves when they are
        asked; or "iter" for `__iter__` of another one.
        """
        kinds = {"__next__": self._next, "__iter__": self._make_iterator, "iter": self._iterate}
        self._replace(owner, "__iter__" if name == "iter" else name, kinds[name])

    def _iterate(self, original: Any) -> Any:
        @functools.wraps(original)
        def iterate(loader: Any) -> Any:
            self._recorder.note_workers(loader)
            return Batches(lambda: original(loader), self._recorder, lambda: self._on_ask(loader))

        return iterate

    def _wait(self, original: Any) -> Any:
        recorder = self._recorder

        @functools.wraps(original)
        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not tensor.is_cuda:
                return original(tensor, *args, **kwargs)
            asked_ns = time.monotonic_ns()
            value = original(tensor, *args, **kwargs)
            recorder.synced(time.monotonic_ns() - asked_ns)
            return value

        return read

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        wrapped = wrap(original)
        setattr(owner, name, wrapped)

        def restore() -> None:
            if getattr(owner, name) is wrapped:  # and nobody has wrapped it since
                setattr(owner, name, original)

        self._removals.callback(restore)

    def _around(self, phase: str) -> Callable[[Any], Any]:
        recorder = self._recorder

        def wrap(original: Any) -> Any:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling() or not recorder.is_recording:
                    return original(*args, **kwargs)
                recorder.enter(phase)
                try:
                    return original(*args, **kwargs)
                finally:
                    recorder.leave()

            return call

        return wrap

    def _backward(self, original: Any) -> Any:
        recorder = self._recorder
        timed = self._around("backward")(original)

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            with _at_last_gradient(tensors, recorder.gradients_done):
                return timed(tensors, *args, **kwargs)

        return backward

    def _set_mode(self, original: Any) -> Any:
        @functools.wraps(original)
        def train(module: nn.Module, mode: bool = True) -> Any:
            # Evaluation may call another module, such as a copy with averaged weights.
            if not mode and module not in self._modules and not self._is_searching:
                self._recorder.call(self._start_search)
            return original(module, mode)

        return train

    def _make_iterator(self, original: Any) -> Any:
        recorder = self._recorder

        @functools.wraps(original)
        def make_iterator(loader: Any) -> Any:
            recorder.note_workers(loader)
            recorder.enter("data_wait")  # workers start
            try:
                iterator = original(loader)
            finally:
                recorder.leave()
            self._loaders[iterator] = loader
            return iterator

        return make_iterator

    def _next(self, original: Any) -> Any:
        recorder = self._recorder

        @functools.wraps(original)
        def next_batch(iterator: Any) -> Any:
            batch = None
            self._on_ask(self._loaders.get(iterator))
            recorder.ask(iterator)
            try:
                batch = original(iterator)
            finally:
                recorder.got(batch)
            return batch

        return next_batch

    def _before_update(self, optimizer: Any) -> None:
        if self._optimizer in (None, optimizer):
            self._recorder.enter("optimiser")

    def _after_update(self, optimizer: Any) -> None:
        if self._optimizer in (None, optimizer):
            self._recorder.leave()
            self._recorder.updated()
            recorder = self._recorder
            if recorder.num_steps >= self._searches_until:
                self._end_search()
            is_lost = recorder.lacks_forward and not self._is_searching
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
        self._recorder.begin_forward(is_training, is_broadcast=_has_broadcast(module))

    def _listen_to(self, module: nn.Module) -> None:
        """Note the calls of a module; those of another one inside it are a part of them."""
        recorder = self._recorder
        if len(self._modules) >= _MAX_MODULES:
            return
        self._modules.add(module)
        for parameter in module.parameters():
            self._sizes[id(parameter)] = parameter.numel()
            if parameter.is_cuda and not recorder.is_on_device:
                recorder.use_device(parameter.device)
                for name in _READS:
                    self._replace(torch.Tensor, name, self._wait)
        recorder.num_parameters = sum(self._sizes.values())
        before = ModuleHook(recorder, self._begin)
        after = ModuleHook(recorder, lambda *_: recorder.end_forward())
        handles = [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),
        ]
        inner = getattr(module, "module", None)
        if _has_broadcast(module) and isinstance(inner, nn.Module):
            synced = ModuleHook(recorder, lambda *_: recorder.end_broadcast())
            handles.append(inner.register_forward_pre_hook(synced, prepend=True))
            self._listen_to(inner)  # which evaluation often calls
        for handle in handles:
            self._removals.callback(handle.remove)


def _has_broadcast(module: nn.Module) -> bool:
    """Return whether a module sends its buffers to all ranks before the module in it is called."""
    return isinstance(module, nn.parallel.DistributedDataParallel)


@contextlib.contextmanager
def _at_last_gradient(tensors: Any, call: Callable[[], None]) -> Iterator[None]:
    """Call a function, in a backward pass from these tensors, when the last gradient is computed,
    before what waits for other ranks. Without other ranks it is not called.
    """
    roots = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
    has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if torch.compiler.is_compiling() or not has_ranks or not isinstance(roots, tuple | list):
        yield
        return

    def note(_: torch.Tensor) -> None:
        # The engine's own list of what to do at the end, in which DDP's wait comes later.
        torch.autograd.Variable._execution_engine.queue_callback(call)  # noqa: SLF001

    root = next((entry for entry in roots if entry.requires_grad), None)
    handle = None if root is None else root.register_hook(note)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
