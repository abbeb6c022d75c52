"""`python -m corun` is the command `corun`."""

import sys

from corun.cli import main

sys.exit(main())
