"""What the recipe's `adapt` section refuses."""

import pytest

from drafttrain.errors import UserError
from drafttrain.tasks.adapt_config import AdaptConfig


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("every", 0),
        ("steps", 0),
        ("slots", 0),
        ("max_tokens", 0),
        ("max_tokens", 1),
        ("guard_prompts", 0),
        ("guard_every", 0),
        ("hold_out_every", 1),
        ("drafts", 0),
        ("temperature", -1.0),
        ("fall", 1.0),
        ("replay", "texts"),
        ("buffer", 7),
        ("buffer", True),
        ("buffer", 16.0),
    ],
)
def test_config_refuses_nonsense(key, value):
    with pytest.raises(UserError, match=rf"adapt\.{key} is "):
        AdaptConfig(**{key: value})
