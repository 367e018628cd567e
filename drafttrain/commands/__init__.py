"""One file a command, each with `run(recipe, options)`; it imports what that command needs and composes it."""
