"""Safe reader of pickled dictionaries of numbers, text and NumPy arrays from untrusted files.

A pickle is a program: it can call any function that it can import. Here it can import only the few names that
pickled arrays need, and they resolve to stand-ins that only record their arguments. NumPy never receives a state
from the file: its own `__setstate__` does not validate it, so one flipped byte can crash the process.
"""

from __future__ import annotations

import codecs
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quasiglobal.common.files import reading


def read(path: Path) -> dict[str, Any]:
    """Read the dictionary in the file: text keys; values are numbers, bytes, text, lists and arrays."""
    with reading(path, "a pickled batch"):
        content = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        if type(content) is not dict:
            raise pickle.UnpicklingError("it does not hold a dictionary")
        return {_text(key): _array(value) for key, value in content.items()}


class _Array:
    """Stand-in for an array: `_reconstruct(ndarray, (0,), b"b")`, then `__setstate__`."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.is_fortran, self.content = state


class _Dtype:
    """Stand-in for a dtype: `dtype("u1", False, True)`, then `__setstate__` with the byte order."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        self.name, self.order = _text(name), "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = _text(state[1])


ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): "an argument of _reconstruct, never called",
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): codecs.encode,  # used by protocol 2 for bytes
}


# The unpickler written in Python: the C version allocates the memo size that a damaged file declares.
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, but only arrays are admitted")
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
        raise pickle.UnpicklingError("it has an array that does not hold plain numbers")
    flat: NDArray[Any] = np.frombuffer(value.content, value.dtype.order + value.dtype.name)
    return flat.reshape(value.shape, order="F" if value.is_fortran else "C")
