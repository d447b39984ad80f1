"""`qg` whose sites look after their federation file and certificates more often, or say another library version."""

import os

from quasiglobal.cli import main
from quasiglobal.engines.distributed import sites

sites.WATCH = 0.3
if "OTHER_VERSION" in os.environ:
    sites._version = lambda: os.environ["OTHER_VERSION"]

if __name__ == "__main__":
    main()
