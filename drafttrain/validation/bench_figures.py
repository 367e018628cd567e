"""The figures of a benchmark, drawn from the numbers in bench.json alone."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from drafttrain import plots
from drafttrain.validation.bench_config import PLAIN

STAGES = ("draft", "check", "commit", "rest")


def figures_of(result: Mapping) -> dict[str, tuple[str, Figure]]:
    """File name -> (caption, figure), in the order to be shown."""
    figures: dict[str, tuple[str, Figure]] = {}
    for table in result["temperatures"]:
        temperature = table["temperature"]
        methods = {name: m for name, m in table["methods"].items() if name != PLAIN}
        if methods:
            panels = {"tau": _by_category(methods, "tau"), "speed-up": _by_category(methods, "speedup")}
            caption = f"tau and speed-up by category, temperature {temperature:g}"
            figures[f"categories-t{temperature:g}.png"] = (caption, plots.by_category(panels))
            depths = {name: plots.Acceptance(m["acceptance_by_depth"], m["reach_by_depth"]) for name, m in methods.items()}
            caption = f"acceptance by position, in percent, temperature {temperature:g}"
            figures[f"acceptance-t{temperature:g}.png"] = (caption, plots.acceptance_by_depth(depths))
    return figures | _at_first_temperature(result)


def _by_category(methods: Mapping, key: str) -> dict[str, dict[str, float]]:
    categories = dict.fromkeys(name for m in methods.values() for name in m["categories"])
    found = {name: {label: m["categories"][name][key] for label, m in methods.items()} for name in categories}
    return found | {"all": {label: m[key] for label, m in methods.items()}}


def _at_first_temperature(result: Mapping) -> dict[str, tuple[str, Figure]]:
    rounds = {name: {stage: m["ms_per_round"][stage] for stage in STAGES} for name, m in result["breakdown"]["methods"].items()}
    figures = {"stages.png": ("where a round's time goes", plots.stacked(rounds, "milliseconds a round"))}
    if result["draft_length"]:
        points = result["draft_length"]["points"]
        speedup, tau = ({p["drafts"]: p[key] for p in points} for key in ("speedup", "tau"))
        figure = plots.speed_by_drafts(speedup, tau, result["draft_length"]["best"])
        figures["drafts.png"] = ("speed-up and tau against draft length", figure)
    if len(result["throughput"]) > 1:
        names = [*(n for n in result["throughput"][0]["methods"] if n != PLAIN), PLAIN]
        rates, speedups = (
            {n: {b["batch"]: b["methods"][n][key] for b in result["throughput"]} for n in names if n != PLAIN or key != "speedup"}
            for key in ("tokens_per_second", "speedup")
        )
        figures["batches.png"] = ("throughput against batch size", plots.speed_by_batch(rates, speedups))
    return figures
