"""`python -m andon_conformance` is `andon conformance`."""

import sys

from andon_conformance.app import main

sys.exit(main(sys.argv[1:]))
