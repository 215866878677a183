"""The made task: right answers, held-out sums, the same files for the same seed."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from stretto import rewards
from stretto.errors import InvalidArgumentError
from stretto.tasks import word_problems
from stretto.tasks.__main__ import main
from stretto.tasks.word_problems import Sum, questions, rows, sums, write


def test_a_question_and_its_solution_read_as_documented() -> None:
    assert Sum(47, "+", 6).question(0) == "Tom has 47 apples and buys 6 more. How many apples now?"
    assert Sum(47, "+", 6).solution() == " 47+6=53\n#### 53"
    assert Sum(47, "-", 6).question(0) == "Tom has 47 apples and sells 6. How many apples now?"
    assert Sum(47, "-", 6).solution(42, with_mark=False) == " 47-6=42"


def test_every_wording_of_every_sum_is_a_question_of_its_own() -> None:
    assert len({Sum(10, op, 2).question(w) for op in ("+", "-") for w in range(192)}) == 2 * 4 * 8 * 6


def test_the_splits_part_all_sums_and_a_fifth_is_held_out() -> None:
    train, held_out = set(sums("train")), set(sums("validation"))
    assert not train & held_out
    assert len(train | held_out) == 80 * 8 * 2
    assert 0.17 < len(held_out) / 1280 < 0.23


def test_no_pair_of_last_digits_is_missing_from_training() -> None:
    left = Counter((s.a % 10, s.op, s.b) for s in sums("train"))
    assert len(left) == 10 * 2 * 8
    assert min(left.values()) >= 3


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_numbers_in_the_text_are_those_of_the_answer(split: word_problems.Split) -> None:
    for asked, text in questions(3, split, 500):
        assert [int(n) for n in re.findall(r"\d+", text)] == [asked.a, asked.b]
        assert asked.is_held_out == (split == "validation")
        assert 1 <= asked.value <= 98


def test_the_solution_earns_the_reward_and_a_slip_does_not() -> None:
    for row, (asked, _) in zip(rows(0, "train", 200), questions(0, "train", 200), strict=True):
        kwargs = {"ground_truth": row["ground_truth"], "data_source": row["data_source"], "prompt": row["prompt"], "extra": {}}
        for response, reward in ((asked.solution(), 1), (asked.solution(asked.value + 1), 0), (asked.solution(with_mark=False), 0)):
            assert rewards.gsm8k(response=response, **kwargs)["reward"] == reward


def test_a_seed_is_a_dataset_without_repetition() -> None:
    first = [r["prompt"] for r in rows(0, "train", 2000)]
    assert first == [r["prompt"] for r in rows(0, "train", 2000)]
    assert len(set(first)) == 2000
    assert first != [r["prompt"] for r in rows(1, "train", 2000)]


def test_more_questions_than_there_are_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="validation questions, not 1000000"):
        list(rows(0, "validation", 1_000_000))


def test_files_are_written_once_and_again_only_when_they_are_not_what_was_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert write(folder, 0, 20, 10)
    assert not write(folder, 0, 20, 10)
    assert write(folder, 1, 20, 10)
    assert write(folder, 1, 21, 10)
    (folder / "train.jsonl").write_text("{}\n")
    assert write(folder, 1, 21, 10)
    lines = (folder / "train.jsonl").read_text().splitlines()
    assert len(lines) == 21
    assert set(json.loads(lines[0])) == {"prompt", "ground_truth", "data_source"}
    assert sorted(p.name for p in folder.iterdir()) == ["train.jsonl", "validation.jsonl", "word-problems.json"]


def test_the_command_writes_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["word-problems", "--out", str(tmp_path), "--seed", "2", "--train", "5", "--validation", "3"]) == 0
    assert "5 questions to train on, 3 held out" in capsys.readouterr().out
    assert len((tmp_path / "validation.jsonl").read_text().splitlines()) == 3
    assert main(["word-problems", "--out", str(tmp_path), "--train", "1000000000"]) == 2
