"""`python -m fxpar`: the command line."""

import sys

from fxpar.cli.main import main

sys.exit(main())
