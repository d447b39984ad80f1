"""Who may take part: keys, certificates, the federation file that the organiser signs, and the folders of both sides.

`cryptography` is imported inside functions, so that a training on one machine does not load it.
"""
