"""The user's ``transform`` in worker processes, ``transform_in="process"``: its Python does not
hold our lock.

Each thread of the stage ``transform`` sends its sample to a process of its own and waits for what
comes back. Samples and results travel through a pipe as pickles, so no shared memory can be left
behind; an image that comes back in its shape is copied to its place in the batch's buffer. Workers
are started by a fork server, which has torch loaded, at their first sample; they end with
:meth:`ProcessTransform.close`, with the loader, or with this process, however that ends. In a
worker process that may not have children, such as torch's DataLoader makes, the transform runs in
threads.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import multiprocessing.util
import os
import pickle
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from fuelrail.loaders.batch.transfer import is_plain
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.workers import (
    check_main_guard,
    ctrl_c_waits,
    pickled_error,
    set_up_worker,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U8

_JOIN_S: Final = 5.0
_LOADED_IN: Final = os.getpid()
"""The process whose fork server may be used: a fork of it cannot talk to its parent's."""


class _Worker(NamedTuple):
    process: Any
    pipe: Any

    def ask(self, request: bytes | memoryview) -> Any:
        """Return the answer; raise ChildProcessError if the worker ends instead, and what it
        raised.
        """
        try:
            self.pipe.send_bytes(request)
            answer = self.pipe.recv_bytes()
        except (EOFError, OSError) as error:
            self.process.join(_JOIN_S)
            raise ChildProcessError(
                f"the worker process {self.process.pid} of transform ended with exit code "
                f"{self.process.exitcode} (negative: killed by that signal, as -9 for lack "
                "of memory; 1: the lines above say why); the next iteration starts another one"
            ) from error
        value, failed = pickle.loads(answer)
        if failed is not None:
            raise value from failed
        return value


class _Pool:
    """The workers of one process; ``idle`` are those that no thread has taken."""

    def __init__(self) -> None:
        self.idle: deque[_Worker] = deque()
        self._all: list[_Worker] = []
        # Before multiprocessing terminates what is left, and only in the process that started the
        # workers.
        self.end = multiprocessing.util.Finalize(
            self,
            _end_workers,
            (self._all, self.idle),
            exitpriority=10,
        )

    def start(self, setup: bytes) -> _Worker:
        worker = _Worker(*start_process(_serve, "fuelrail-transform"))
        self._all.append(worker)
        try:
            worker.ask(setup)
        except ChildProcessError:
            raise
        except Exception as error:
            raise ConfigError(
                f"transform cannot be loaded in a worker process ({error}): define it in a "
                "module that can be imported, or leave out transform_in='process'"
            ) from error
        return worker


def start_process(serve: Callable[[Any], None], name: str) -> tuple[Any, Any]:
    """Start a process, which has torch loaded, and return it with a connection to
    ``serve(connection)`` there.
    """
    context: Any = multiprocessing.get_context(
        "forkserver" if os.getpid() == _LOADED_IN else "spawn"
    )
    if os.getpid() == _LOADED_IN:
        context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    with ctrl_c_waits(), theirs:
        process = context.Process(
            target=serve,
            args=(theirs,),
            name=name,
            daemon=True,
        )
        process.start()
    return process, ours


def _end_workers(workers: list[_Worker], idle: deque[_Worker]) -> None:
    """End the workers: idle ones by closing their pipes, those that a thread still waits for by
    a signal.
    """
    for worker in workers:
        if worker in idle:
            worker.pipe.close()
        else:
            worker.process.kill()
    for worker in workers:
        worker.process.join(_JOIN_S)
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join()


class ProcessTransform:
    """The user's function, called in worker processes.

    Raise ConfigError for one that cannot be pickled.
    """

    def __init__(self, function: Callable[[dict[str, Any]], Any] | None) -> None:
        if function is None:
            raise ConfigError(
                "transform_in='process' says where transform runs, and there is none: give "
                "transform="
            )
        check_main_guard()
        try:
            self._setup = pickle.dumps((function, torch.get_num_threads()))
        except Exception as error:
            raise ConfigError(
                f"transform={function!r} cannot be pickled, which transform_in='process' "
                f"needs ({error}): make it a function of a module, or an object of a class "
                "of a module that holds plain values"
            ) from error
        self._function = function
        self._pools: dict[int, _Pool] = {}

    def __call__(self, sample: dict[str, Any]) -> Any:
        """Return what the function makes of the sample; raise what it raises, caused by the
        worker's traceback.
        """
        if multiprocessing.current_process().daemon:
            return self._function(sample)
        pool = self._pools.get(os.getpid()) or self._pools.setdefault(os.getpid(), _Pool())
        try:
            worker = pool.idle.pop()
        except IndexError:
            worker = pool.start(self._setup)
        try:
            value = worker.ask(_dump(sample))
        finally:
            if worker.process.is_alive():
                pool.idle.append(worker)
        if isinstance(value, dict) and "img" in value:
            value["img"] = _copy_into(sample["img"], value["img"])
        return value

    def close(self) -> None:
        """End this process's workers; a later call starts others."""
        pool = self._pools.pop(os.getpid(), None)
        if pool is not None:
            pool.end()


def _copy_into(place: Any, content: Any) -> Any:
    """Return the buffer's own images, or those of each group of cameras, with the content of
    images of their form.
    """
    if isinstance(place, dict):
        if isinstance(content, dict):
            return {name: _copy_into(place.get(name), part) for name, part in content.items()}
        return content
    if (
        not isinstance(content, torch.Tensor)
        or place is None
        or (content.shape, content.dtype) != (place.shape, place.dtype)
    ):
        return content
    return place.copy_(content)


def _serve(pipe: Any) -> None:
    """Run in a worker: take the function, then answer each sample until the pipe closes."""
    set_up_worker()
    functions: list[Callable[[Any], Any]] = []

    def take(setup: tuple[Callable[[Any], Any], int]) -> None:
        functions.append(setup[0])
        torch.set_num_threads(setup[1])  # as in the trainer's process: sums may depend on it

    with contextlib.suppress(EOFError, OSError):
        pipe.send_bytes(_answer(take, pipe.recv_bytes()))
        while functions:
            pipe.send_bytes(_answer(functions[0], pipe.recv_bytes()))


def _answer(work: Callable[[Any], Any], request: bytes) -> bytes | memoryview:
    """Return what the work makes of a request, and None; or the error, and what it was caused
    by.
    """
    try:
        result = work(pickle.loads(request))
        try:
            return _dump((result, None))
        except Exception as error:
            raise ConfigError(
                "transform returned what cannot be pickled, which transform_in='process' "
                f"needs: {error}"
            ) from error
    except BaseException as error:  # noqa: BLE001 - the consumer must see any error, sys.exit() too
        return pickled_error(error)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Write plain tensors as their own elements; torch would write all of the memory that a
        view is of.
        """
        if not is_plain(value):
            return NotImplemented
        content: Any = content_of(value)
        return _make_tensor, (
            pickle.PickleBuffer(content),
            value.dtype,
            tuple(value.shape),
        )


def content_of(tensor: torch.Tensor) -> U8:
    """Return the elements of a plain tensor as bytes, uint8 (n,)."""
    # Strides of axes of length 1 may be any.
    dense = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    content: U8 = dense.view(torch.uint8).numpy()
    return content


def _make_tensor(
    content: bytearray,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> torch.Tensor:
    if content:
        return torch.frombuffer(content, dtype=dtype).view(shape)
    return torch.empty(shape, dtype=dtype)


def _dump(value: Any) -> memoryview:
    out = io.BytesIO()
    _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(value)
    return out.getbuffer()
