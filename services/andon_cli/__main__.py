"""`python -m andon_cli` is the `andon` command."""

from __future__ import annotations

import sys

from andon_cli.app import main

if __name__ == "__main__":
    sys.exit(main())
