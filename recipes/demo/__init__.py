"""A small language model of the Kimi K3 architecture, trained here, with everything needed to train it again.

``python -m recipes.demo.train`` writes ``checkpoint/`` and ``heldout/``. Importing this package imports no torch.
"""
