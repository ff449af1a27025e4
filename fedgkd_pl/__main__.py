"""``python -m fedgkd_pl``."""

import sys

from fedgkd_pl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
