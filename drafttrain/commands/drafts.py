"""What a command works with: the target, the drafter and where it is found; and the card of an export."""

from pathlib import Path

from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.save import load_drafter
from drafttrain.errors import UserError
from drafttrain.export.card import MADE_FILE, report_of, write_card
from drafttrain.export.export import load_export
from drafttrain.files import read_json
from drafttrain.run import Run
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.target.target import Target


def load(config: TargetConfig) -> Target:
    """The target, after a line that says so: large ones take minutes. Raises UserError."""
    print(f"loading {config.path}")
    return load_target(config)


def find_draft(run: Run) -> Path:
    """The export of a run, else its best checkpoint. Raises UserError if there is neither."""
    for folder, sign in ((run.export, MADE_FILE), (run.best, "drafter.json")):
        if (folder / sign).exists():
            return folder
    raise UserError(f"{run.folder}/ has neither export/ nor checkpoints/best/: run train (and export) with this recipe first.")


def load_draft(folder: Path, target: Target) -> DrafterNet:
    """An export, or a drafter as training saves it. Raises UserError."""
    return load_drafter(folder, target)[0] if (folder / "drafter.json").exists() else load_export(folder, target)


def export_hash(folder: Path) -> str | None:
    """sha256 of an export's weights; None if the folder is no export of ours."""
    made = folder / MADE_FILE
    return read_json(made, "the export")["weights"]["sha256"] if made.exists() else None


def refresh_card(run: Run) -> None:
    """Write the export's model card again, with the report's numbers if the report is about these very weights."""
    report = report_of(run.report)
    if (digest := export_hash(run.export)) is not None:
        write_card(run.export, report if report is not None and report.get("export_hash") == digest else None)


def training_facts(record: dict) -> dict:
    """What a saved drafter knows about its training, flat, for the model card."""
    facts = record["facts"]
    position = facts.get("position") or {}
    found = {
        "steps": position.get("step"),
        "tokens seen": position.get("tokens"),
        "held-out tau while training": position.get("best_tau"),
    }
    return {name: value for name, value in found.items() if value is not None}
