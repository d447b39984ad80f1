"""Many copies of any module as one program: their parameters are the rows of one tensor.

It knows no node, topology or algorithm. `stack.py` has the stacked model and chooses the route that computes its
gradients and outputs (`routes.py`, `kernels/`), `layout.py` says which columns are which parameters, and `guard.py`
compares a route's first gradient with plain PyTorch's.
"""
