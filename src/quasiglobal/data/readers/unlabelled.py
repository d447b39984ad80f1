"""Data without labels, for predictions: image files, arrays, tables of numbers and texts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quasiglobal.common.files import reading
from quasiglobal.data.readers import folders, npz, number_tables, tables
from quasiglobal.errors import InputError


def image_files(path: Path) -> list[Path]:
    """The file itself, or all images under a folder, sorted by name."""
    if not os.path.isdir(path):
        return [path]
    with reading(path, "a folder of images"):
        found = sorted(file for file in path.rglob("*") if file.suffix.lower() in folders.ENDINGS and file.is_file())
    if not found:
        raise InputError(f"{path} holds no images ({', '.join(sorted(folders.ENDINGS))})")
    return found


def images(files: Sequence[Path], shape: Sequence[int], resize: bool) -> Tensor:
    """Image files as uint8 [m, channels, height, width]; with `resize`, their middle is scaled to this size."""
    channels, height, width = shape
    found = []
    for file in files:
        with folders.opened_image(file) as image:
            folders.check_depth(image, file)
            if resize:
                found.append(folders.middle(image, shape))
            elif image.size != (width, height):
                raise InputError(
                    f"{file} has {image.size[0]} x {image.size[1]} pixels, but the model takes {width} x {height}; "
                    "scale it, or add --resize"
                )
            else:
                found.append(folders.pixels(image, channels))
    return torch.from_numpy(np.ascontiguousarray(np.stack(found)))


def array(path: Path, memory_limit: float) -> Tensor:
    """The array x of an .npz archive, or its only array."""
    content = npz.arrays(path, memory_limit)
    if "x" not in content and len(content) != 1:
        raise InputError(f"{path} has the arrays {', '.join(content) or 'none'}; it needs x")
    name = "x" if "x" in content else next(iter(content))
    return torch.from_numpy(np.require(npz.numbers(content[name], f"{name} in {path}"), requirements=["C", "W"]))


def table(path: Path, features: Sequence[str], label: str, width: int, memory_limit: float) -> Tensor:
    """The columns `features` of a CSV file as float32 [m, width]; without names, all but the column `label`."""
    names, cells = number_tables.read_cells(path, memory_limit)
    wanted = list(features) or [name for name in names if name != label]
    if missing := [name for name in wanted if name not in names]:
        raise InputError(f"{path} has no column {missing[0]!r}; the model was trained on {', '.join(wanted)}")
    columns = [number_tables.column_of_numbers(path, name, cells[names.index(name)]) for name in wanted]
    if len(columns) != width:
        raise InputError(f"{path} has {len(columns)} columns of numbers, but the model takes {width}")
    return torch.from_numpy(np.stack(columns, axis=1))


def texts(path: str, memory_limit: float) -> list[str]:
    """The texts of a file: one per line of a .txt file or of the standard input, -; or the text of a CSV file."""
    if path.endswith(tables.SUFFIXES):
        return tables.read_text_column(Path(path), memory_limit)
    return tables.read_texts(path)
