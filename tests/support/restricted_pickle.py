"""Foreign pickles, without running what they say: only plain containers and numpy scalars come out."""

from __future__ import annotations

import pickle
from typing import IO, Any

import numpy as np


def _encode(text: str, encoding: str) -> bytes:
    # Protocol 2 pickles write bytes as latin-1 text.
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode("latin1")


_SCALAR = np.float64(0.0).__reduce__()[0]  # it lies elsewhere in numpy 1
_ALLOWED = {
    ("numpy.core.multiarray", "scalar"): _SCALAR,
    ("numpy._core.multiarray", "scalar"): _SCALAR,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode,
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"the pickle asks for {module}.{name}, which is not allowed"
            )
        return _ALLOWED[module, name]


def load_restricted(file: IO[bytes]) -> Any:
    return _Restricted(file).load()
