"""What a command works with: the target, the drafter and where it is found; and the card of an export.

A command measures the run's own drafter, or the one that --draft names: a folder of ours, or a published drafter (a folder or a Hub id), which is
built as its own folder describes it. What is measured of another drafter than the run's own lies beside the run's reports:

    runs/NAME/report/                       of its export, or of its best checkpoint before there is one
    runs/NAME/report/drafts/OWNER--NAME/    of a drafter that --draft names, called by its Hub id or its path
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.data.store import Manifest
from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.measured import AsPublished
from drafttrain.drafters.save import MADE_FILE, load_drafter
from drafttrain.drafters.start_files import find, fitting
from drafttrain.errors import UserError
from drafttrain.export.card import report_of, write_card
from drafttrain.export.card_bench import bench_of
from drafttrain.export.card_figures import curve_kept
from drafttrain.export.export import load_export
from drafttrain.files import read_json
from drafttrain.options import Options
from drafttrain.recipe import Recipe
from drafttrain.run import Run
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.target.target import Target
from drafttrain.validation.curve import read_curve


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


LONGEST_NAME = 120
"""Most characters of a report folder's name; the end of a path tells more than its beginning."""


@dataclass(frozen=True)
class Draft:
    """The drafter that a command was given, found before the target is loaded."""

    where: str
    """As it is called in reports: a path (within the run folder, for its own), or a Hub id."""
    folder: Path
    report: Path
    """Where what is measured of it is written."""
    own: bool
    """Whether it is what the run's own reports are about."""

    @staticmethod
    def of(recipe: Recipe, options: Options) -> "Draft":
        """The one that --draft names, else the run's own. UserError if it is not to be had."""
        run, asked = options.run, options.draft
        if asked is None:
            folder = find_draft(run)
            return Draft(str(folder.relative_to(run.folder)), folder, run.report, own=True)
        folder = find(str(asked), recipe.checkpoint.start_pickle, AsPublished.asked)
        if folder.resolve() in (run.export.resolve(), run.best.resolve()):
            return Draft(str(asked), folder, run.report, own=True)
        return Draft(str(asked), folder, run.report / "drafts" / _plain_name(str(asked)), own=False)

    def load(self, target: Target, recipe: Recipe) -> tuple[DrafterNet, dict[str, Any]]:
        """The net, and what a report says of it. Notes are printed. UserError for a folder that is damaged, or no drafter of this target."""
        with fitting(f"--draft {self.where}" if not self.own else self.where):
            facts = {"draft": self.where, "export_hash": export_hash(self.folder)}
            if any((self.folder / sign).exists() for sign in ("drafter.json", MADE_FILE)):
                return load_draft(self.folder, target), facts
        published = AsPublished.open(self.where, recipe.checkpoint.start_pickle, recipe.drafter, target, self.folder)
        net, lines = published.build()
        for line in lines:
            print(line)
        told = {"draft": f"{self.where} ({published.found.layout})", "draft_notes": lines}
        return net, facts | told


def _plain_name(where: str) -> str:
    """A Hub id or a path as the name of a folder."""
    parts = [part for part in Path(where).parts if part not in ("/", ".", "..", "~")]
    return "--".join(parts)[-LONGEST_NAME:]


def export_hash(folder: Path) -> str | None:
    """sha256 of an export's weights; None if the folder is no export of ours."""
    made = folder / MADE_FILE
    return read_json(made, "the export")["weights"]["sha256"] if made.exists() else None


def refresh_card(run: Run) -> None:
    """Write the export's model card and its figures again, with the numbers of those reports that are about these very weights."""
    report, benchmark = report_of(run.report), bench_of(run.report)
    if (digest := export_hash(run.export)) is not None:
        found = (each if each is not None and each.get("export_hash") == digest else None for each in (report, benchmark))
        write_card(run.export, *found)


def training_facts(facts: dict) -> dict:
    """What a saved drafter knows about its training, flat, for the model card."""
    position = facts.get("position") or {}
    found = {
        "steps": position.get("step"),
        "tokens seen": position.get("tokens"),
        "held-out tau while training": position.get("best_tau"),
    }
    return {name: value for name, value in found.items() if value is not None}


ANSWERED = ("samples", "greedy", "temperature", "top_p")
"""What of a token store's settings a card says."""


def data_facts(run: Run) -> dict[str, Any]:
    """Where the chats and the loss come from, for the model card of a drafter that this run trained: `data` by the store's manifest, `curve` by the
    log. What is not there, or cannot be read, is left out: an export needs neither."""
    found: dict[str, Any] = {}
    try:
        manifest = Manifest.read(run.data / "train")
        found["data"] = {
            "chats": manifest.rows["kept"],
            "tokens": manifest.tokens,
            "supervised_tokens": manifest.supervised_tokens,
            "sources": {name: ledger["kept"] for name, ledger in manifest.facts.get("sources", {}).items()},
            "answers": {name: manifest.facts[name] for name in ANSWERED if name in manifest.facts},
        }
    except UserError:
        pass
    if curve := curve_kept(read_curve(run.logs)):
        found["curve"] = curve
    return found
