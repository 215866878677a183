"""The fast parts of the made model; the whole warm start runs in the system tests."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.trainer import make_model, warm_start
from stretto.errors import RefusedError, StrettoError
from stretto.tasks import word_problems


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> warm_start.PreTrainedTokenizerFast:
    return warm_start.make_tokenizer()


def ids_of(tokenizer: warm_start.PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.backend_tokenizer.encode(text).ids


def test_the_tokenizer_is_the_same_each_time_and_loses_nothing(tokenizer: warm_start.PreTrainedTokenizerFast) -> None:
    assert warm_start.make_tokenizer().get_vocab() == tokenizer.get_vocab()
    for text in ("Tom has 47 apples and buys 6 more.", " 47+6=53\n#### 53", "Größe: 中文 🙂"):
        assert tokenizer.decode(ids_of(tokenizer, text)) == text


def test_every_digit_is_a_token_and_questions_are_short(tokenizer: warm_start.PreTrainedTokenizerFast) -> None:
    lengths = {len(ids_of(tokenizer, question)) for _, question in word_problems.questions(0, "validation", 500)}
    assert max(lengths) <= 17
    answer = ids_of(tokenizer, " 47+6=53\n#### 53")
    assert [tokenizer.decode([i]) for i in answer[1:6]] == ["4", "7", "+", "6", "="]
    assert len(answer) < 18


def test_a_chat_is_its_contents(tokenizer: warm_start.PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "How many now?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "How many now?"


def test_demonstrations_are_sloppy_as_documented_and_labelled_on_the_response_only(tokenizer: warm_start.PreTrainedTokenizerFast) -> None:
    batches = warm_start.demonstrations(tokenizer, random.Random(0), warm_start.WRONG_SHARE)
    num, num_wrong, num_marked = 0, 0, 0
    for _ in range(30):
        ids_BT, labels_BT = next(batches)
        for ids, labels in zip(ids_BT.tolist(), labels_BT.tolist(), strict=True):
            places = [t for t, label in enumerate(labels) if label >= 0]
            assert places == list(range(places[0], places[-1] + 1))
            response = [ids[t] for t in places]
            assert response == [labels[t] for t in places]
            text = tokenizer.backend_tokenizer.decode(response, skip_special_tokens=False)
            assert text.endswith(warm_start.EOS)
            text = text.removesuffix(warm_start.EOS)
            left, _, right = text.partition("\n#### ")[0].partition("=")
            num, num_wrong, num_marked = num + 1, num_wrong + (eval_sum(left) != int(right)), num_marked + ("####" in text)
    assert num_wrong / num == pytest.approx(warm_start.WRONG_SHARE, abs=0.04)
    assert num_marked / num == pytest.approx(1 - warm_start.UNMARKED_SHARE, abs=0.04)


def eval_sum(text: str) -> int:
    a, op, b = text.strip().partition("+") if "+" in text else text.strip().partition("-")
    return int(a) + int(b) if op == "+" else int(a) - int(b)


def test_the_one_pass_check_agrees_with_decoding_greedily_token_by_token(tokenizer: warm_start.PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    model = warm_start.make_model(tokenizer).eval()
    prompts = [ids_of(tokenizer, question) for _, question in word_problems.questions(0, "validation", 6)]
    answers: list[list[int]] = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(5):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    assert warm_start.share_greedy(model, *warm_start.pad(list(zip(prompts, answers, strict=True)), tokenizer)) == 1.0
    answers[2] = [*answers[2][:4], (answers[2][4] + 1) % len(tokenizer)]
    assert warm_start.share_greedy(model, *warm_start.pad(list(zip(prompts, answers, strict=True)), tokenizer)) == pytest.approx(5 / 6)


def test_the_model_has_the_documented_size_and_knows_its_end(tokenizer: warm_start.PreTrainedTokenizerFast) -> None:
    model = warm_start.make_model(tokenizer)
    assert 0.17e6 < sum(p.numel() for p in model.parameters()) < 0.19e6
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_a_hold_that_never_learns_ends_with_what_to_do(tokenizer: warm_start.PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    reports: list[warm_start.Report] = []
    with pytest.raises(StrettoError, match=r"did not learn to add: greedy arithmetic is 0\.\d\d after 25 steps.*choose another run\.seed"):
        warm_start.train(warm_start.make_model(tokenizer), tokenizer, random.Random(0), reports.append, hold_steps_max=25)
    assert [(r.phase, r.step) for r in reports] == [("hold", 25)]


# ------------------------------------------------------------------------------------------------ the folder


def made_folder(folder: Path, seed: int) -> Path:
    folder.mkdir()
    numbers = {"num_parameters": 183648, "num_steps": 700, "arithmetic": 0.95, "accuracy": 0.29}
    (folder / make_model.MARKER).write_text(json.dumps({"key": make_model._key("word-problems", seed), **numbers}))
    return folder


def test_a_second_call_does_nothing_and_needs_no_torch(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "model", 3)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from services.trainer.make_model import main\n"
        f"sys.exit(main(['word-problems', '--out', {str(folder)!r}, '--seed', '3']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "sampled accuracy 0.29 (already there)" in done.stdout


def test_a_folder_of_somebody_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RefusedError, match="not a made model"):
        make_model.make("word-problems", tmp_path, 0, lambda _: None)
    assert (tmp_path / "config.json").exists()


def test_a_warm_start_that_is_interrupted_leaves_the_old_model_alone(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "model", 3)

    def interrupt(report: warm_start.Report) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_model.make("word-problems", folder, 4, interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert not make_model.make("word-problems", folder, 3, interrupt)
