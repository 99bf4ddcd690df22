"""``python -m sixfold.indexed_data`` is the command ``sixfold-data``."""

import sys

from sixfold.indexed_data.cli import main

if __name__ == "__main__":
    sys.exit(main())
