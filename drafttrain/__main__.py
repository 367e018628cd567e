"""`python -m drafttrain COMMAND`"""

import sys

from drafttrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
