"""What to do if a user's model, loss or metric fails: any exception becomes one sentence with a remedy."""

from __future__ import annotations

import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.memory import is_out_of_memory
from quasiglobal.errors import InputError
from quasiglobal.stacked.one_model import Loss, arguments

CROSS_ENTROPIES = (nn.functional.cross_entropy, nn.functional.nll_loss)
"""Losses that need one output per class."""


@contextmanager
def misfit(what: str, remedy: str | Callable[[str], str]) -> Iterator[None]:
    """Turn an exception of the user's code, or torch's warning that shapes do not fit, into one sentence.

    `remedy` may be a function of what the exception says.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")
            yield
    except InputError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        said = " ".join(str(error).split())[:200].rstrip(".")
        told = remedy if isinstance(remedy, str) else remedy(said)
        raise InputError(f"{what}: {type(error).__name__}: {said}{_place(error)}; {told}") from None


def _place(error: Exception) -> str:
    """The innermost line of the user's own code in which the error occurred."""
    ours = Path(__file__).parents[1]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = [(frame.f_code.co_filename, frame.f_lineno) for frame in frames]
    own = [(name, line) for name, line in files if "site-packages" not in name and ours not in Path(name).parents]
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""


def remedy_for(inputs: Any, original: nn.Module | None, said: str) -> str:
    """What to do if a model fails on its inputs; `original` is the user's module if the model is a copy of it."""
    if "dtype" in said and all(leaf.is_floating_point() for leaf in tree_leaves(inputs)):
        return "all parts are trained in one precision: cast to that of a weight, x.to(self.layer.weight.dtype)"
    if original is not None and _works(original, inputs):
        return "your module works, but a copy of it does not, as with a hook that refers to it; give its class"
    if isinstance(inputs, dict):
        return f"check that forward has the arguments {', '.join(map(str, inputs))}, or takes one dict"
    whole = any(not leaf.is_floating_point() for leaf in tree_leaves(inputs))
    return ("convert whole numbers to float, or " if whole else "") + "check the sizes of its layers"


def _works(module: nn.Module, inputs: Any) -> bool:
    """Whether a module works in evaluation mode."""
    given, named = arguments(module, inputs)
    training = module.training
    try:
        with torch.no_grad():
            module.eval()(*given, **named)
    except Exception:
        return False
    finally:
        module.train(training)
    return True


def remedy_for_loss(loss: Loss, output: Any, targets: Any, said: str) -> str:
    """What to do if a loss fails on outputs and targets."""
    try:
        inspect.signature(loss).bind(output, targets)
    except TypeError:
        return "it is called with two arguments, (output, target)"
    except ValueError:                                      # it has no signature
        pass
    if isinstance(output, Tensor) and isinstance(targets, Tensor):
        whole = not targets.is_floating_point()
        if is_cross_entropy(loss):
            if not whole and targets.ndim == 1:
                return "class numbers need to be whole: y.long()"
            if whole and targets.shape == output.shape:
                return "give class numbers, y.argmax(dim=1), or probabilities, y.float()"
            if whole and targets.shape == (len(output), 1):
                return "flatten the targets: y[:, 0]"
            if output.ndim > 2 and output.shape[:-1] == targets.shape:
                return "move the classes to axis 1: output.transpose(1, -1)"
        elif whole and re.search("dtype|result type", said):
            return "convert the targets to float: y.float()"
        if output.ndim == 2 and output.shape[1] == 1 and targets.ndim == 1:
            return "make the targets a column, y[:, None], or flatten the output"
        if output.ndim == 1 and targets.shape == (len(output), 1):
            return "flatten the targets: y[:, 0]"
    return "check the sizes and types of both, and their order: (output, target)"


def is_cross_entropy(loss: Loss) -> bool:
    """Whether a loss needs one output per class."""
    return any(loss is one for one in CROSS_ENTROPIES) or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)


def shapes(values: Any) -> str:
    """Shapes, and dtypes of what is not float32, of a tensor or several."""
    def one(value: Tensor) -> str:
        kind = "" if value.dtype == torch.float32 else f"{str(value.dtype).removeprefix('torch.')} "
        return f"{kind}{list(value.shape)}"

    return str(tree_map(one, values)).replace("'", "")
