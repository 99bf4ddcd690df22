"""``python -m sixfold.gpt VERB`` is ``sixfold VERB``."""

import sys

from sixfold.gpt.command import main

if __name__ == "__main__":
    sys.exit(main())
