"""`python -m stretto.reference`: the page of all recipe settings, made from `stretto/recipe.py` so that it cannot be wrong."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from stretto.recipe import Recipe

HEAD = """# Recipe settings

A recipe is a TOML file with these sections. Environment variables `STRETTO_<SECTION>__<KEY>` replace what the file says, and
`section.key=value` arguments replace both. Unknown keys are refused. Made by `make docs`; do not edit.
"""


def page() -> str:
    """The whole page, Markdown."""
    sections = [_section(name, field) for name, field in Recipe.model_fields.items()]
    return "\n".join([HEAD, *sections])


def _section(name: str, section: FieldInfo) -> str:
    model: Any = section.annotation
    rows = [f"| `{key}` | {_kind(field)} | {_default(field)} | {field.description or ''} |" for key, field in model.model_fields.items()]
    return "\n".join(
        [f"## [{name}]", str(model.__doc__).strip(), "", "| key | type and range | default | meaning |", "|---|---|---|---|", *rows, ""]
    )


def _kind(field: FieldInfo) -> str:
    limits = [text for limit in field.metadata for text in _limit(limit)]
    return " ".join([_type(field.annotation), *limits]).replace("|", "\\|")


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_type(part) for part in get_args(annotation) if part is not type(None))
    return {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}.get(annotation, str(annotation))


def _limit(limit: Any) -> list[str]:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [f"{sign} {getattr(limit, name)}" for name, sign in signs.items() if getattr(limit, name, None) is not None]
    pattern = getattr(limit, "pattern", None)
    return [*found, f"matching `{pattern}`"] if pattern else found


def _default(field: FieldInfo) -> str:
    if field.default is None:
        return "unset"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`" if str(field.default) else "empty"


if __name__ == "__main__":
    sys.stdout.write(page())
