"""From prompts to a token store: gather, split, have the target answer, write. `python -m data_prep --config RECIPE`."""
