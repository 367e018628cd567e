"""What a sentence tells to install is an extra of the package, in the versions that pyproject.toml wants."""

import re
import tomllib
from pathlib import Path

from drafttrain.errors import install

ROOT = Path(__file__).resolve().parents[1]


def test_what_is_to_be_installed_is_an_extra_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = "".join(path.read_text() for part in ("drafttrain", "data_prep") for path in (ROOT / part).rglob("*.py"))
    named = re.findall(r"\{install\('([\w-]+)'\)\}", told)
    assert set(named) == {"deepspeed", "peft", "torchao"} <= extras.keys()
    assert not re.findall(rf"pip install (?:{'|'.join(extras)})\b", told)
    assert 'pip install -e ".[peft]"' in install("peft")
