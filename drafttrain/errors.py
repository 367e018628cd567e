"""The one error that a user is meant to see, and how words of anybody's files are shown."""

from collections.abc import Sequence


class UserError(Exception):
    """Something the user can mend: says what, got, wanted and the way out, in one sentence. The CLI prints it and exits 2.

    `notes` are no faults: what the user has to know besides.
    """

    def __init__(self, words: str = "", notes: Sequence[str] = ()):
        super().__init__(words)
        self.notes = tuple(notes)


def install(extra: str) -> str:
    """The command that installs a library of pyproject.toml's optional dependencies in the version that is wanted. `extra`: its name there."""
    return f'`pip install -e ".[{extra}]"` in the folder of drafttrain'


def printable(words: str) -> str:
    """The words with everything that a terminal would obey, or that no encoding has (line ends too), spelt as Python spells it."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in words)
