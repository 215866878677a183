from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto import recipe
from stretto.errors import RecipeError

LEAST = {"model": {"make": "word-problems"}, "data": {"make": "word-problems"}}


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "r.toml"
    path.write_text('[model]\nmake = "word-problems"\n[data]\nmake = "word-problems"\n[trainer]\nsteps = 7\n')
    return path


def test_the_command_line_goes_before_the_environment_before_the_file(toml: Path) -> None:
    environ = {"STRETTO_TRAINER__STEPS": "8", "STRETTO_TRAINER__LEARNING_RATE": "2e-4", "STRETTO_ADDRESS": "no setting"}
    assert recipe.load(toml).trainer.steps == 7
    assert recipe.load(toml, (), environ).trainer.steps == 8
    loaded = recipe.load(toml, ["trainer.steps=9", "trainer.schedule=cosine"], environ)
    assert (loaded.trainer.steps, loaded.trainer.schedule, loaded.trainer.learning_rate) == (9, "cosine", 2e-4)


def test_an_override_can_take_back_what_the_recipe_makes(toml: Path) -> None:
    assert recipe.load(toml, ["data.make=", "data.train=own.jsonl"]).train_path == Path("own.jsonl")
    with pytest.raises(RecipeError, match=r"data.make= on the command line takes it back"):
        recipe.load(toml, ["data.train=own.jsonl"])


# C30: a setting that does not exist is refused with its nearest neighbour.
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.stepps=1", "trainer.stepps = 1: there is no such key; did you mean 'trainer.steps'?"),
        ("traner.steps=1", "traner = {'steps': 1}: there is no such section; did you mean 'trainer'?"),
        ("steps=1", "override steps=1: the key must be section.key"),
        ("trainer.steps", "'trainer.steps': an override is section.key=value"),
        ("trainer.steps=0", "trainer.steps = 0: Input should be greater than or equal to 1"),
        ("trainer.learning_rate=inf", "trainer.learning_rate = inf: Input should be a finite number"),
    ],
)
def test_a_setting_that_is_wrong_is_refused_by_name(toml: Path, override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.load(toml, [override])
    assert caught.value.message.startswith(message)


# C30: every setting is documented.
def test_every_section_and_setting_is_documented() -> None:
    for name, field in recipe.Recipe.model_fields.items():
        section: Any = field.annotation
        assert section.__doc__, name
        assert [key for key, f in section.model_fields.items() if not f.description] == [], name


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.build({**LEAST, "trainer": {"steps": 0, "lr": 1}, "rollout": {"slots": -1}})
    assert len(caught.value.message.splitlines()) == 3


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        ({"data": {"make": "word-problems"}}, ("model.path or model.make must be set",)),
        ({**LEAST, "model": {"make": "word-problems", "path": "x"}}, ("model.make = 'word-problems'", "model.path = 'x'", "set one")),
        ({**LEAST, "data": {"make": "word-problem"}}, ("data.make", "did you mean 'word-problems'?")),
        ({**LEAST, "scheduler": {"window": 97}}, ("scheduler.window = 97", "= 96")),
        ({**LEAST, "scheduler": {"window": 31}}, ("scheduler.window = 31", "scheduler.batch_groups = 32")),
        ({**LEAST, "trainer": {"minibatches": 3}}, ("scheduler.batch_groups = 32", "trainer.minibatches = 3")),
        ({**LEAST, "sampling": {"group_size": 1}}, ("sampling.group_size = 1", "at least 2")),
        ({**LEAST, "sampling": {"temperature": 0}}, ("sampling.temperature = 0", "sampling.group_size = 8")),
        ({**LEAST, "rollout": {"slots": 4}}, ("rollout.slots = 4", "sampling.group_size = 8")),
        ({**LEAST, "trainer": {"warmup_steps": 101}}, ("trainer.warmup_steps = 101", "trainer.steps = 100")),
        ({**LEAST, "scheduler": {"lease_s": 2}}, ("scheduler.lease_s = 2.0", "scheduler.heartbeat_s = 1.0")),
    ],
)
def test_rules_between_settings_name_both_values(tree: dict[str, object], parts: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.build(tree)
    for part in parts:
        assert part in caught.value.message


def test_a_file_that_is_missing_or_no_toml_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no such file"):
        recipe.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[run\n")
    with pytest.raises(RecipeError, match="not TOML"):
        recipe.load(tmp_path / "bad.toml")
    (tmp_path / "flat.toml").write_text("run = 3\n")
    with pytest.raises(RecipeError, match=r"run = 3: .*dictionary"):
        recipe.load(tmp_path / "flat.toml", ["run.name=x"])


def test_every_recipe_in_the_repository_is_valid() -> None:
    found = sorted(Path("recipes").glob("*.toml"))
    assert found
    for path in found:
        recipe.load(path)


def test_what_is_not_set_follows_from_the_run_folder_and_the_lag() -> None:
    loaded = recipe.build({**LEAST, "run": {"folder": "runs/x"}})
    assert (loaded.model_path, loaded.train_path) == (Path("runs/x/model"), Path("runs/x/data/train.jsonl"))
    assert loaded.window == 96
