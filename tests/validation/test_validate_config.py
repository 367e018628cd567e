"""A validate section that makes no sense is refused with the key that the user typed."""

import pytest

from drafttrain.errors import UserError
from drafttrain.validation.config import ValidateConfig


@pytest.mark.parametrize("key", ["drafts", "max_tokens", "slots", "prompts"])
def test_a_zero_is_named(key):
    with pytest.raises(UserError, match=f"validate.{key} is 0"):
        ValidateConfig(**{key: 0})
