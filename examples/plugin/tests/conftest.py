"""Have failed assertions of the suite show their values."""

import pytest

pytest.register_assert_rewrite("finetune_operator.testing")
