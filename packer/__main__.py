"""``python -m packer`` is ``moepack``."""

import sys

from packer.cli import main

sys.exit(main())
