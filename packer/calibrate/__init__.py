"""Calibration: one pass of sample text through a model, layer by layer, and what each expert did in it.

``texts`` makes windows of tokens, ``layerwise`` pushes them through one layer after the other, ``sums`` adds up what is
seen, ``job`` makes all of it resumable. The result is a statistics file (``packer.statistics.file``).
"""
