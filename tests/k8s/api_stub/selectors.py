"""Label and field selectors of list and watch."""

import re
from typing import Any

Manifest = dict[str, Any]

_SET = re.compile(r"^(\S+)\s+(in|notin)\s+\((.*)\)$")


def matches(manifest: Manifest, label_selector: str, field_selector: str) -> bool:
    labels = manifest["metadata"].get("labels") or {}
    terms = [term.strip() for term in re.split(r",(?![^(]*\))", label_selector) if term.strip()]
    if not all(_label_term(labels, term) for term in terms):
        return False
    return all(_field_term(manifest, term) for term in field_selector.split(",") if term)


def _label_term(labels: dict[str, str], term: str) -> bool:
    if found := _SET.match(term):
        values = {value.strip() for value in found[3].split(",")}
        is_in = labels.get(found[1]) in values
        return is_in if found[2] == "in" else not is_in
    if "!=" in term:
        name, _, value = term.partition("!=")
        return labels.get(name.strip()) != value.strip()
    if "=" in term:
        name, value = re.split("==?", term, maxsplit=1)
        return labels.get(name.strip()) == value.strip()
    if term.startswith("!"):
        return term[1:] not in labels
    return term in labels


def _field_term(manifest: Manifest, term: str) -> bool:
    path, value = re.split("==?|!=", term, maxsplit=1)
    found: Any = manifest
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    is_equal = ("" if found is None else str(found)) == value
    return not is_equal if "!=" in term else is_equal
