"""``python -m sixfold.gpt VERB`` is ``sixfold VERB``."""

import sys

from sixfold.gpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
