"""What an engine cannot serve is refused with a choice that can: every format that such a sentence names holds this very drafter."""

import re

import pytest

from drafttrain.errors import UserError
from drafttrain.export.config import FORMATS, ExportConfig
from drafttrain.export.export import export_drafter
from export.test_round_trip import CASES, net_for, why_not

NAMED = re.compile(rf"(?:export\.format|Set it) to ((?:(?:{'|'.join(FORMATS)})(?:, | or )?)+)")
REFUSED = [
    (*case, architecture)
    for architecture in ("llama", "gemma3")
    for case in CASES
    if why_not(*case, architecture) and (architecture == "llama" or not why_not(*case, "llama"))
]
"""On the target that scales its embeddings, what is refused for that alone."""


@pytest.mark.parametrize(("name", "asked", "size", "architecture"), REFUSED)
def test_the_choice_that_a_refusal_names_is_one(targets, tmp_path, name, asked, size, architecture):
    target = targets(architecture)
    net = net_for(target, name, size)
    with pytest.raises(UserError) as caught:
        export_drafter(net, target, tmp_path / "export", ExportConfig(format=asked), None)
    message = str(caught.value)
    choices = [choice for found in NAMED.findall(message) for choice in re.split(r", | or ", found) if choice]
    assert choices and asked not in choices, message
    for choice in choices:
        export_drafter(net, target, tmp_path / choice, ExportConfig(format=choice), None)
    nearest = [each for each in FORMATS if each != "native" and why_not(name, each, size, architecture) is None]
    assert not nearest or set(choices) & set(nearest), message
