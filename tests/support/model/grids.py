"""Whether whole grids of cases run (`make grids`), or the few of each that stand for them."""

import os

IS_WHOLE = "FINETUNE_TEST_GRIDS" in os.environ
