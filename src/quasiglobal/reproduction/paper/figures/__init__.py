"""The paper's figures: toy problems (`toy.py`), and training runs from a store (`training.py`)."""

from quasiglobal.reproduction.paper.figures.drawing import Canvas, Reproduced, write_figure
from quasiglobal.reproduction.paper.figures.toy import FIGURES, make_figure
from quasiglobal.reproduction.paper.figures.training import TRAINED, draw_from_store, draw_outcomes, title_of

__all__ = [
    "FIGURES", "TRAINED", "Canvas", "Reproduced", "draw_from_store", "draw_outcomes", "make_figure", "title_of",
    "write_figure",
]
