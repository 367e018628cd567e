"""The licence in an export: what the recipe says, else what the target's own files say, and a sentence wherever a reader has to know more.

drafttrain.json: license, license_name, license_link    for the front matter; the name and the link only of what the Hub calls `other`; a list
                                                        where the target's files name several licences
                 target_license                         what the target's files say, null where they say nothing
"""

from collections.abc import Mapping
from typing import Any

from drafttrain.target.origin import OTHER, Origin

KEYS = ("license", "license_name", "license_link")
TARGETS = "target_license"


def licence_of(asked: str | None, origin: Origin, repository: str | None) -> dict[str, Any]:
    """What drafttrain.json says of the licence. `asked`: by the recipe; `repository`: the target's Hub id, where it is known."""
    own = {"license": origin.license, "license_name": origin.license_name, "license_link": origin.address(repository)}
    told = {"license": asked, "license_name": None, "license_link": None}
    carried = own if asked is None or _same(asked, origin.license) else told
    return carried | {TARGETS: None if origin.license is None else own}


def licence_text(made: Mapping[str, Any]) -> str:
    """The section of the card; "" where the recipe's word stands unopposed, and for an export that an earlier version wrote."""
    if TARGETS not in made:
        return ""
    target = made[TARGETS]
    if target is None and made["license"] is not None:
        return ""
    if target is None:
        return "## Licence\n\nThe licence of the target was not found in its files: look it up before you use or pass on this drafter.\n"
    if _same(made["license"], target["license"]):
        return f"## Licence\n\n{_named(target)}, as the target's own files say of the target.{_which(target)}\n"
    return (
        f"## Licence\n\nThis drafter was put under {_named(made)}, but the target's own files say {_named(target)}, whose terms may bind what was "
        f"trained on its answers: read both.{_which(target)}\n"
    )


def licence_warning(made: Mapping[str, Any]) -> str | None:
    """A line for the user whose recipe names another licence than the target's files."""
    target = made[TARGETS]
    if target is None or _same(made["license"], target["license"]):
        return None
    return (
        f"export.license is {made['license']}, but the target's own files say {_plain(target)}; the card says both. Leave export.license out to carry "
        "the target's over."
    )


def _same(one: str | list[str] | None, other: str | list[str] | None) -> bool:
    words, others = ({each.strip().lower() for each in _several(license)} for license in (one, other))
    return bool(words) and words == others


def _several(license: str | list[str] | None) -> list[str]:
    return [license] if isinstance(license, str) else license or []


def _which(said: Mapping[str, Any]) -> str:
    """What a list leaves open."""
    several = len(_several(said["license"])) > 1
    return " Which of these holds for what, or whether one may be chosen, only its authors can say." if several else ""


def _named(said: Mapping[str, Any]) -> str:
    """The licence in a sentence of Markdown: words of somebody else's file, which must not become a link or a page of their own."""
    name, link = said.get("license_name"), said.get("license_link")
    extra = "".join([f", called `{_code(name)}`" if name else "", f", at <{link}>" if link and _clean(link) else ""])
    return " and ".join(f"`{_code(each)}`{extra if each == OTHER else ''}" for each in _several(said["license"]))


def _plain(said: Mapping[str, Any]) -> str:
    extra = f" ({said['license_name']})" if said.get("license_name") else ""
    return " and ".join(each + (extra if each == OTHER else "") for each in _several(said["license"]))


def _code(words: str) -> str:
    return words.replace("`", "'")


def _clean(link: str) -> bool:
    return not any(each in link for each in "<> \"'`")
