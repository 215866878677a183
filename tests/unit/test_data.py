"""Datasets: checked rows, tokens without torch, an endless order that is one number."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer

from services.scheduler.data import Dataset, group_seed, permutation
from stretto import recipe as recipes
from stretto.errors import InvalidArgumentError, RecipeError
from stretto.recipe import Recipe
from stretto.v1 import types_pb2 as pb
from stretto.v1.scheduler_pb2 import UserPrompt


def recipe_of(model: Path, file: Path, **sections: Mapping[str, Any]) -> Recipe:
    data = {"train": str(file), **sections.pop("data", {})}
    return recipes.build({"model": {"path": str(model)}, "data": data, "sampling": {"group_size": 4, "max_new_tokens": 7}, **sections})


def jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def question(i: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"{i}+1=", "ground_truth": str(i + 1), "data_source": "sums", **more}


def text_of(model: Path, prompt: pb.Prompt) -> str:
    return Tokenizer.from_file(str(model / "tokenizer.json")).decode(np.frombuffer(prompt.token_ids, "<i4").tolist())


@pytest.fixture
def ten(tmp_path: Path, byte_model: Path) -> Dataset:
    file = jsonl(tmp_path / "train.jsonl", [question(i, level=i % 3) for i in range(10)])
    return Dataset.open(file, recipe=recipe_of(byte_model, file))


# ------------------------------------------------------------------------------------------------ order


def test_each_epoch_is_every_row_once_in_an_order_of_its_own(ten: Dataset) -> None:
    epochs = [[ten.prompt(e * 10 + i).row for i in range(10)] for e in range(3)]
    assert all(sorted(rows) == list(range(10)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3


def test_without_shuffling_rows_come_in_file_order(tmp_path: Path, byte_model: Path) -> None:
    file = jsonl(tmp_path / "train.jsonl", [question(i) for i in range(4)])
    data = Dataset.open(file, recipe=recipe_of(byte_model, file, data={"shuffle": False}))
    assert [data.prompt(i).row for i in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


@given(st.integers(1, 300), st.integers(0, 2**31 - 1), st.integers(0, 10**6))
def test_the_order_of_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(size, seed, epoch).tolist()) == list(range(size))


def test_the_order_never_changes_between_versions_of_anything() -> None:
    assert permutation(8, 0, 0).tolist() == [6, 4, 0, 1, 7, 3, 5, 2]
    assert group_seed(0, "d0") == 4740938294086765489


def test_the_shuffle_moves_rows_evenly() -> None:
    places = np.stack([np.argsort(permutation(16, 7, epoch)) for epoch in range(2000)])
    assert np.abs(places.mean(axis=0) - 7.5).max() < 0.5


# ------------------------------------------------------------------------------------------------ prompts


def test_a_training_prompt_carries_its_row_and_how_to_sample_it(ten: Dataset, byte_model: Path) -> None:
    prompt = ten.prompt(23)
    row = prompt.row
    assert (prompt.uid, prompt.ordinal, prompt.kind) == ("d23", 23, pb.PROMPT_KIND_TRAIN)
    assert text_of(byte_model, prompt) == prompt.text == f"{row}+1="
    assert (prompt.ground_truth, prompt.data_source, json.loads(prompt.extra_json)) == (str(row + 1), "sums", {"level": row % 3})
    assert (prompt.group_size, prompt.sampling.max_new_tokens, prompt.sampling.temperature) == (4, 7, 1.0)
    assert prompt.sampling.seed == group_seed(0, "d23")


def test_the_same_ordinal_is_the_same_bytes_in_another_dataset_object(ten: Dataset, tmp_path: Path, byte_model: Path) -> None:
    again = Dataset.open(tmp_path / "train.jsonl", recipe=recipe_of(byte_model, tmp_path / "train.jsonl"))
    assert again.prompt(17).SerializeToString(deterministic=True) == ten.prompt(17).SerializeToString(deterministic=True)
    assert again.fingerprint() == ten.fingerprint()


def test_every_ordinal_has_a_seed_of_its_own_also_for_the_same_row(ten: Dataset) -> None:
    assert len({ten.prompt(i).sampling.seed for i in range(100)}) == 100


@pytest.mark.parametrize("change", [{"run": {"seed": 1}}, {"data": {"shuffle": False}}])
def test_the_fingerprint_tells_another_order(ten: Dataset, tmp_path: Path, byte_model: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "train.jsonl"
    assert Dataset.open(file, recipe=recipe_of(byte_model, file, **change)).fingerprint() != ten.fingerprint()


def test_validation_takes_the_first_rows_in_file_order_with_its_own_sampling(tmp_path: Path, byte_model: Path) -> None:
    file = jsonl(tmp_path / "validation.jsonl", [question(i) for i in range(5)])
    recipe = recipe_of(byte_model, file, validation={"group_size": 2, "temperature": 0.5, "top_k": 3})
    data = Dataset.open(file, recipe=recipe)
    first, all_of_them = data.validation_prompts("7", 3), data.validation_prompts("8", 0)
    assert [p.uid for p in first] == ["v7-0", "v7-1", "v7-2"]
    assert [p.row for p in all_of_them] == [0, 1, 2, 3, 4]
    assert {(p.kind, p.ordinal, p.group_size) for p in first} == {(pb.PROMPT_KIND_VALIDATION, -1, 2)}
    assert (first[0].sampling.temperature, first[0].sampling.top_k, first[0].sampling.max_new_tokens) == (0.5, 3, 7)
    assert [p.sampling.seed for p in first] == [p.sampling.seed for p in all_of_them[:3]]
    assert len(data.validation_prompts("9", 100)) == 5


# ------------------------------------------------------------------------------------------------ templates and files


def test_messages_go_through_the_chat_template_and_text_does_not(tmp_path: Path, byte_model: Path) -> None:
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
    file = jsonl(tmp_path / "t.jsonl", [question(0, prompt=messages), question(1, prompt="2+2")])
    data = Dataset.open(file, recipe=recipe_of(byte_model, file, data={"shuffle": False}))
    assert text_of(byte_model, data.prompt(0)) == "<system>add\n<user>1+1\n<assistant>"
    assert data.prompt(0).text == "1+1"
    assert text_of(byte_model, data.prompt(1)) == "2+2"
    always = Dataset.open(file, recipe=recipe_of(byte_model, file, data={"shuffle": False, "chat_template": "always"}))
    assert text_of(byte_model, always.prompt(1)) == "<user>2+2\n<assistant>"
    with pytest.raises(RecipeError, match=r"t\.jsonl, line 1: messages need a chat template, and data\.chat_template = 'never'"):
        Dataset.open(file, recipe=recipe_of(byte_model, file, data={"chat_template": "never"}))


def test_what_a_template_refuses_names_the_line(tmp_path: Path, byte_model: Path) -> None:
    file = jsonl(tmp_path / "t.jsonl", [question(0), question(1, prompt=[{"role": "tool", "content": "x"}])])
    with pytest.raises(RecipeError, match=r"line 2: the chat template refuses the messages: no tools here"):
        Dataset.open(file, recipe=recipe_of(byte_model, file))


def test_parquet_with_nested_columns_reads_as_other_trainers_write_it(tmp_path: Path, byte_model: Path) -> None:
    rows = [
        {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": f"{i}+1"}],
            "reward_model": {"style": "rule", "ground_truth": i + 1},
            "extra_info": {"index": i, "weight": float("nan")},
        }
        for i in range(3)
    ]
    file = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    data = Dataset.open(file, recipe=recipe_of(byte_model, file, data={"answer_column": "reward_model.ground_truth", "shuffle": False}))
    prompt = data.prompt(2)
    assert (prompt.ground_truth, prompt.data_source, prompt.text) == ("3", "gsm8k", "2+1")
    extra = json.loads(prompt.extra_json)
    assert extra == {"reward_model": {"style": "rule", "ground_truth": 3}, "extra_info": {"index": 2, "weight": None}}


def test_too_long_prompts_are_skipped_and_counted_and_rows_keep_their_number(tmp_path: Path, byte_model: Path) -> None:
    file = jsonl(tmp_path / "t.jsonl", [question(0), question(1, prompt="x" * 50), question(2)])
    data = Dataset.open(file, recipe=recipe_of(byte_model, file, data={"max_prompt_tokens": 10, "shuffle": False}))
    assert (len(data), data.num_skipped) == (2, 1)
    assert [data.prompt(i).row for i in range(2)] == [0, 2]
    with pytest.raises(RecipeError, match=r"none of its 3 prompts fits data\.max_prompt_tokens = 2: the shortest has 4"):
        Dataset.open(file, recipe=recipe_of(byte_model, file, data={"max_prompt_tokens": 2}))


def test_a_row_without_source_belongs_to_the_default_one_unless_a_column_was_asked_for(tmp_path: Path, byte_model: Path) -> None:
    file = jsonl(tmp_path / "t.jsonl", [{"prompt": "1", "ground_truth": 1.5}])
    assert Dataset.open(file, recipe=recipe_of(byte_model, file)).prompt(0).data_source == "default"
    with pytest.raises(RecipeError, match=r"column 'origin' is missing \(data\.source_column\)"):
        Dataset.open(file, recipe=recipe_of(byte_model, file, data={"source_column": "origin"}))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "a", "answer": "1"}', r"column 'ground_truth' is missing \(data\.answer_column\); the row has 'prompt', 'answer'"),
        ('{"promt": "a", "ground_truth": "1"}', r"column 'prompt' is missing .*did you mean 'promt'\?"),
        ('{"prompt": "a", "ground_truth": null}', "column 'ground_truth' is null"),
        ('{"prompt": "a", "ground_truth": NaN}', "column 'ground_truth' is nan"),
        ('{"prompt": "", "ground_truth": "1"}', "column 'prompt' is empty"),
        ('{"prompt": 7, "ground_truth": "1"}', "column 'prompt' must be text or a list of messages, not int 7"),
        ('{"prompt": [], "ground_truth": "1"}', "column 'prompt' must be text or a list of messages, not list"),
        ('{"prompt": [{"role": "user"}], "ground_truth": "1"}', "column 'prompt' message 0 must have content as text, not NoneType"),
        ('{"prompt": ["hi"], "ground_truth": "1"}', "column 'prompt' message 0 must be an object with role and content"),
        ('{"prompt": "\\ud800", "ground_truth": "1"}', "prompt holds a lone surrogate"),
        ('{"prompt": "a"', "not JSON: Expecting ',' delimiter at column"),
        ('["a"]', "must be a JSON object, not list"),
    ],
)
def test_a_bad_row_is_one_error_with_file_line_column_and_rule(tmp_path: Path, byte_model: Path, line: str, says: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(f"{json.dumps(question(0))}\n\n{line}\n")
    with pytest.raises(RecipeError, match=rf"t\.jsonl, line 3: {says}"):
        Dataset.open(file, recipe=recipe_of(byte_model, file))


def test_a_file_that_is_none_is_refused_by_its_key(tmp_path: Path, byte_model: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    (tmp_path / "rows.csv").write_text("prompt\n")
    for name, says in [
        ("none.jsonl", r"data\.train = .*none\.jsonl': there is no such file"),
        ("empty.jsonl", "there are no rows"),
        ("bad.jsonl", "line 1: not UTF-8 at byte 12"),
        ("bad.parquet", "not a readable Parquet file"),
        ("rows.csv", r"must end in \.jsonl or \.parquet"),
    ]:
        with pytest.raises(RecipeError, match=says):
            Dataset.open(tmp_path / name, recipe=recipe_of(byte_model, tmp_path / name))


def test_a_model_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "t.jsonl", [question(0)])
    with pytest.raises(RecipeError, match=r"model\.path = .*there is no tokenizer\.json"):
        Dataset.open(file, recipe=recipe_of(tmp_path, file))


# ------------------------------------------------------------------------------------------------ users' own prompts


def test_a_users_prompt_is_text_messages_or_tokens(ten: Dataset, byte_model: Path) -> None:
    messages = json.dumps([{"role": "user", "content": "hi"}])
    tokens = ten.prompt(0).token_ids
    for user, text, shown in [
        (UserPrompt(text="2+2", ground_truth="4", data_source="mine", extra_json='{"k": 1}'), "2+2", "2+2"),
        (UserPrompt(messages_json=messages), "<user>hi\n<assistant>", "hi"),
        (UserPrompt(token_ids=tokens), ten.prompt(0).text, ten.prompt(0).text),
    ]:
        prompt = ten.named(ten.user_prompt(user), "u3")
        assert (prompt.uid, prompt.kind, prompt.ordinal, prompt.row) == ("u3", pb.PROMPT_KIND_USER, -1, -1)
        assert (text_of(byte_model, prompt), prompt.text) == (text, shown)
        assert (prompt.data_source, prompt.extra_json) == (user.data_source or "default", user.extra_json or "{}")
        assert (prompt.group_size, prompt.sampling.seed) == (4, group_seed(0, "u3"))


@pytest.mark.parametrize(
    ("user", "says"),
    [
        (UserPrompt(), "exactly one of text, messages_json and token_ids must be set, not none"),
        (UserPrompt(text="a", messages_json="[]"), "exactly one"),
        (UserPrompt(token_ids=b"abc"), "multiple of 4"),
        (UserPrompt(token_ids=np.array([300], "<i4").tobytes()), "token id 300 is outside the model's vocabulary of 257"),
        (UserPrompt(messages_json="{"), "messages_json"),
        (UserPrompt(messages_json="[]"), "list of messages"),
        (UserPrompt(text="a", extra_json="[1]"), "extra_json must be a JSON object, not list"),
        (UserPrompt(text="a", extra_json="{"), "extra_json is not JSON"),
        (UserPrompt(text="a" * 2000), r"2000 tokens; it must have between 1 and data\.max_prompt_tokens = 1024"),
    ],
)
def test_a_users_bad_prompt_is_refused_with_the_rule(ten: Dataset, user: UserPrompt, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        ten.user_prompt(user)


# ------------------------------------------------------------------------------------------------ cost

WITHOUT_TORCH = """
import sys, time
from pathlib import Path
from services.scheduler.tokens import hide_torch
hide_torch()
from services.scheduler.data import Dataset
from stretto import recipe
import transformers
model, file = sys.argv[1:]
began = time.process_time()
data = Dataset.open(Path(file), recipe=recipe.build({"model": {"path": model}, "data": {"train": file}}))
print(len(data), time.process_time() - began, "torch" in {name for name, module in sys.modules.items() if module is not None})
"""


def test_ten_thousand_rows_open_within_two_seconds_where_torch_is_not_installed(tmp_path: Path, byte_model: Path) -> None:
    file = jsonl(tmp_path / "t.jsonl", [question(i, prompt="Tom has 47 apples and buys 6 more. How many now?") for i in range(10_000)])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(byte_model), str(file)], capture_output=True, text=True, timeout=60, check=True
    )
    num, cpu_s, has_torch = done.stdout.split()
    assert (num, has_torch) == ("10000", "False")
    assert float(cpu_s) < 2
    assert "PyTorch" not in done.stderr


def test_a_prompt_costs_microseconds(tmp_path: Path, byte_model: Path) -> None:
    file = jsonl(tmp_path / "t.jsonl", [question(i) for i in range(2000)])
    data = Dataset.open(file, recipe=recipe_of(byte_model, file))
    began = time.process_time()
    for ordinal in range(2000):
        data.prompt(ordinal)
    assert (time.process_time() - began) / 2000 < 1e-3
