"""Where a recorder listens in torch: hooks of modules and optimisers, and functions that are called
around backward passes, collectives, checkpoints and the loading of batches.

A hook returns None and changes nothing. Outermost modules are found by torch's hook of all modules
in the first steps; then only these have hooks, for a hook of all modules would cost each of them a
microsecond or two.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import re
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import optimizer as optimisers
from torch.utils._pytree import tree_leaves
from torch.utils.data import dataloader as torch_loaders

if TYPE_CHECKING:
    from fuelrail.bench.measure.recorder import Recorder

_SEARCHED_STEPS: Final = 3
"""Steps in which outermost modules are looked for; and again when a step has no forward pass."""
_MAX_SEARCHED_STEPS: Final = 24
_MAX_MODULES: Final = 32

_COLLECTIVES: Final = re.compile(
    r"_?broadcast|all_|barrier|gather|monitored_barrier|recv|reduce(?!_op)|scatter"
)
"""How the functions of torch.distributed begin that wait for other ranks."""

_READS: Final = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__")
"""Methods of a tensor for whose values the host waits for the device."""

Inputs: TypeAlias = list[tuple[torch.Size, torch.dtype, torch.device]]


class Batches:
    """An iteration over a loader; it keeps no batch, so that none lives longer than without it."""

    def __init__(self, hooks: Hooks, iterate: Callable[[Any], Iterator[Any]], loader: Any) -> None:
        self._loader = loader
        self._hooks = hooks
        self._batches = hooks.start(loader, iterate)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._hooks.take_batch(next, self._batches, self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_batches"), name)


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
    """

    def __init__(
        self, recorder: Recorder, *, models: Iterable[nn.Module] = (), optimizer: Any = None
    ) -> None:
        self.recorder = recorder
        self.inputs = weakref.WeakKeyDictionary[nn.Module, Inputs]()
        """Modules whose calls are forward passes, and what the last call was given, if tensors."""
        self.on_ask: Callable[[Any], None] | None = None
        """Called with a loader before it is asked for a batch."""
        # A trainer's wrapper, such as Accelerate's, has the optimiser that torch knows inside.
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        self.removals = contextlib.ExitStack()
        """What leaves torch, and all that is watched besides, as it was."""
        self._search: Any = None  # torch's handle of it
        self._num_searched = 0
        self._loaders = weakref.WeakKeyDictionary[Any, Any]()
        for model in models:
            self._listen_to(model)
        if not self.inputs:
            self._start_search()
        begin_update = functools.partial(self._note_update, recorder.enter, "optimiser")
        end_update = functools.partial(self._note_update, recorder.call, self._end_update)
        self.removals.callback(optimisers.register_optimizer_step_pre_hook(begin_update).remove)
        self.removals.callback(optimisers.register_optimizer_step_post_hook(end_update).remove)
        self.replace(torch.autograd, "backward", self._go_backward)
        self.listen(torch, "save", "checkpoint")
        self.listen(logging.Logger, "handle", "logging")
        self.replace(nn.Module, "train", self._set_mode)
        if dist.is_available():
            for name, function in list(vars(dist).items()):
                if _COLLECTIVES.match(name) and callable(function):
                    self.listen(dist, name, "all_reduce")
            self.listen(dist.Work, "wait", "all_reduce")
        self.listen(torch_loaders.DataLoader, "__iter__", "iterator")
        self.listen(torch_loaders._BaseDataLoaderIter, "__next__", "batch")  # noqa: SLF001
        gc.callbacks.append(recorder.collected)
        self.removals.callback(gc.callbacks.remove, recorder.collected)

    def remove(self) -> None:
        """Leave torch as it was."""
        self._end_search()
        self.removals.close()

    def listen(self, owner: Any, name: str, role: str) -> None:
        """Note the calls of a function.

        ``role``: the phase that they are; "iterator", a loader makes one that says itself when it
        is asked for a batch; "batches", it makes another one; "batch", an iterator gives one.
        """
        calls: dict[str, Callable[..., Any]]
        batches = functools.partial(Batches, self)
        calls = {"iterator": self._iterate, "batches": batches, "batch": self.take_batch}
        in_phase = functools.partial(self._call_in_phase, role)
        self.replace(owner, name, calls.get(role, in_phase))

    def replace(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Have ``call`` called in place of a function, with it and its arguments."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return call(original, *args, **kwargs)

        def restore() -> None:
            if getattr(owner, name) is wrapped:  # and nobody has wrapped it since
                setattr(owner, name, original)

        setattr(owner, name, wrapped)
        self.removals.callback(restore)

    def start(self, loader: Any, iterate: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """Return an iterator over a loader, whose workers start."""
        num_workers = getattr(loader, "num_workers", 0)
        if isinstance(num_workers, int):
            self.recorder.num_workers = max(self.recorder.num_workers, num_workers)
        with self.recorder.phase("data_wait"):
            return iterate(loader)

    def take_batch(self, take: Callable[[Any], Any], iterator: Any, loader: Any = None) -> Any:
        """Return an iterator's next batch, and note when the loop asked for it, and when it
        came.
        """
        batch = None
        if self.on_ask is not None:
            self.on_ask(self._loaders.get(iterator) if loader is None else loader)
        self.recorder.ask(iterator)
        try:
            batch = take(iterator)
            return batch
        finally:
            self.recorder.got(batch)

    def _iterate(self, original: Any, /, loader: Any) -> Any:
        iterator = self.start(loader, original)
        self._loaders[iterator] = loader
        return iterator

    def _call_in_phase(self, phase: str, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.phase(phase):
            return original(*args, **kwargs)

    def _go_backward(self, original: Any, /, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # Before what waits for other ranks, the last gradient is computed.
        root: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            roots = [entry for entry in tree_leaves(tensors) if isinstance(entry, torch.Tensor)]
            root = next((entry for entry in roots if entry.requires_grad), None)

        def note(_: torch.Tensor) -> None:
            # The engine's own list of what to do at the end, in which DDP's wait comes later.
            engine = torch.autograd.Variable._execution_engine  # noqa: SLF001
            engine.queue_callback(self.recorder.gradients_done)

        with contextlib.ExitStack() as removals:
            if root is not None:
                removals.callback(root.register_hook(note).remove)
            return self._call_in_phase("backward", original, tensors, *args, **kwargs)

    def _read(self, original: Any, /, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        asked_ns = time.monotonic_ns()
        value = original(tensor, *args, **kwargs)
        if tensor.is_cuda:
            self.recorder.synced(time.monotonic_ns() - asked_ns)
        return value

    def _set_mode(self, original: Any, /, module: nn.Module, mode: bool = True) -> Any:
        # Evaluation may call another module, such as a copy with averaged weights.
        if not mode and module not in self.inputs and self._search is None:
            self.recorder.call(self._start_search)
        return original(module, mode)

    def _note_update(self, note: Any, entry: Any, optimizer: Any, *_: Any) -> None:
        if self._optimizer in (None, optimizer):
            note(entry)

    def _end_update(self) -> None:
        recorder = self.recorder
        recorder.leave()
        recorder.updated()
        if self._search is not None:
            self._num_searched += 1
            if self._num_searched % _SEARCHED_STEPS == 0:
                self._end_search()
        elif not recorder.has_forward and self._num_searched < _MAX_SEARCHED_STEPS:
            self._start_search()

    def _end_search(self) -> None:
        if self._search is not None:
            self._search.remove()
        self._search = None

    def _start_search(self) -> None:
        """Look for outermost modules among all that are called."""
        # Torch warns of hooks of all modules where one of them is compiled; see below.
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are")
        hook = ModuleHook(self.recorder, self._meet)
        self._search = register_module_forward_pre_hook(hook)

    def _meet(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Listen to a module that is called outside of all others."""
        if not self.recorder.is_idle:
            return
        if module not in self.inputs:
            self._listen_to(module)
            self._begin(module, args)  # in this call its own hook comes too late
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:  # noqa: SLF001
            # Compiled with a hook of all modules it would be compiled again without it.
            self._end_search()

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        is_plain = all(isinstance(value, torch.Tensor) for value in args)
        tensors = args if is_plain else ()
        self.inputs[module] = [(value.shape, value.dtype, value.device) for value in tensors]
        self.recorder.begin_forward(module.training and torch.is_grad_enabled())

    def _listen_to(self, module: nn.Module) -> None:
        """Note the calls of a module; those of another one inside it are a part of them."""
        recorder = self.recorder
        if len(self.inputs) >= _MAX_MODULES:
            return
        self.inputs[module] = []
        devices = [value.device for value in module.parameters() if value.is_cuda]
        if devices and recorder.device is None:
            recorder.use_device(devices[0])
            for name in _READS:
                self.replace(torch.Tensor, name, self._read)
        begin = ModuleHook(recorder, self._begin)
        end = ModuleHook(recorder, lambda *_: recorder.leave())
        self.removals.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
        self.removals.callback(module.register_forward_hook(end, always_call=True).remove)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            self._listen_to(module.module)  # which evaluation often calls
