"""`drafttrain inspect`: what a folder with a drafter is, ours or anybody's, and what is wrong with it."""

from drafttrain.commands.folder_options import InspectOptions
from drafttrain.errors import printable
from drafttrain.export.inspect import inspect_folder, require_sound
from drafttrain.export.inspect_target import read_target


def run(options: InspectOptions) -> None:
    """Print it. Raises UserError, behind everything that is to be printed, with a line for each fault."""
    target = read_target(options.target) if options.target is not None else None
    found = inspect_folder(options.path, target)
    print(f"{printable(options.path)}:")
    width = max(len(name) for name, _ in found.lines)
    for name, words in found.lines:
        print(f"  {name:<{width}}  {words}")
    for note in found.notes:
        print(f"note: {note}")
    require_sound(found.faults)
    print("no fault can be seen from the folder alone; `drafttrain validate` measures what it accepts")
