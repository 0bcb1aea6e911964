"""Run models in a process of its own, as the environment says: ``python -m`` this module, SAVE, IDS, then models.

Saves the logits of each model under its place in the list.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tests.support.runs import run


def main(save: str, ids: str, *models: str) -> None:
    """Run each of ``models`` over the comma-separated ``ids``."""
    fed = [int(word) for word in ids.split(",")]
    np.savez(save, **{str(place): run(Path(model), fed).logits for place, model in enumerate(models)})


if __name__ == "__main__":
    main(*sys.argv[1:])
