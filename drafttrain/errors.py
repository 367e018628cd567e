"""The one error that a user is meant to see."""


class UserError(Exception):
    """Something the user can mend: says what, got, wanted and the way out, in one sentence. The CLI prints it and exits 2."""
