"""Pickled dictionaries of numbers, text and NumPy arrays, read without trusting them.

A pickle is a program: it may call whatever it can name. Here it can name the few things that arrays are
pickled with, and gets stand-ins for them, which only take notes. NumPy never sees a state that comes from
the file: its own `__setstate__` believes what it is told, so that one flipped byte can end the process.
"""

from __future__ import annotations

import codecs
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quasiglobal.data.dataset import reading


def read(path: Path) -> dict[str, Any]:
    """The dictionary in the file, its keys as text, its values numbers, bytes, text, lists and arrays."""
    with reading(path, "a pickled batch"):
        content = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        if type(content) is not dict:
            raise pickle.UnpicklingError("it does not hold a dictionary")
        return {_text(key): _array(value) for key, value in content.items()}


class _Array:
    """In the place of an array: `_reconstruct(ndarray, (0,), b"b")`, then `__setstate__`."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.is_fortran, self.content = state


class _Dtype:
    """In the place of a dtype: `dtype("u1", False, True)`, then `__setstate__` with the byte order."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        self.name, self.order = _text(name), "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = _text(state[1])


ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): "an argument of _reconstruct, never called",
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): codecs.encode,  # how protocol 2 writes bytes
}


# The one written in Python: C's allocates as many slots as a damaged file says that it remembers things.
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only arrays are admitted")
        return ADMITTED[module, name]


def _text(key: object) -> str:
    if isinstance(key, bytes):
        return key.decode("ascii")
    if not isinstance(key, str):
        raise pickle.UnpicklingError("it has a name that is not text")
    return key


PLAIN = {"u1", "i1", "i2", "i4", "i8", "f4", "f8"}


def _array(value: Any) -> Any:
    if not isinstance(value, _Array):
        return value
    if value.dtype.name not in PLAIN or value.dtype.order not in ("|", "<", ">"):
        raise pickle.UnpicklingError("it has an array of something else than plain numbers")
    flat: NDArray[Any] = np.frombuffer(value.content, value.dtype.order + value.dtype.name)
    return flat.reshape(value.shape, order="F" if value.is_fortran else "C")
