"""``python -m sixfold.pipeline`` is the command ``sixfold-pipeline``."""

import sys

from sixfold.pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
