"""The page of settings is the recipe's own words."""

from __future__ import annotations

from pathlib import Path

from stretto.recipe import Recipe
from stretto.reference import page

PAGE = Path(__file__).parents[2] / "docs/recipe.md"


def test_the_committed_page_is_the_one_made_from_the_code() -> None:
    assert PAGE.read_text() == page(), "docs/recipe.md is stale: run make docs"


def test_every_setting_has_a_meaning() -> None:
    silent = [f"{s}.{k}" for s, f in Recipe.model_fields.items() for k, g in f.annotation.model_fields.items() if not g.description]  # type: ignore[union-attr]
    assert silent == []
