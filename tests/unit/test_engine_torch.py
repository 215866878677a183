"""The torch engine against full forward passes of transformers' own model in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from services.rollout.engine import NO_VERSION, Completion, Engine, LoadPolicy, Request
from services.rollout.engine_torch import TorchEngine
from services.rollout.forward import Forward, FusedForward, TransformersForward
from stretto.errors import InvalidArgumentError, NotFoundError, RefusedError

VOCABULARY = 61
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15, "eos_token_id": None, "bos_token_id": None}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3, tied": lambda: Qwen3Config(**SHAPE, **HEADS, head_dim=16, tie_word_embeddings=True),
    "qwen2, untied, qkv biases": lambda: Qwen2Config(**SHAPE, **HEADS, tie_word_embeddings=False),
    "llama, all biases": lambda: LlamaConfig(**SHAPE, **HEADS, attention_bias=True, mlp_bias=True),
    "cohere, any model's path, scaled logits": lambda: CohereConfig(**SHAPE, **HEADS, logit_scale=0.5, pad_token_id=0),
}


@dataclass
class Policy:
    """A model folder and several versions of its weights, with oracles."""

    path: Path
    config: PreTrainedConfig
    _models: dict[int, Any] = field(default_factory=dict)

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        return {name: tensor.float() for name, tensor in self.model(version).state_dict().items()}

    def model(self, version: int) -> Any:
        """In float64; made from the number, remembered."""
        if version not in self._models:
            torch.manual_seed(100 + version)
            model = AutoModelForCausalLM.from_config(self.config)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            self._models[version] = model.eval().double()
        return self._models[version]

    def engine(self, slots: int = 16, max_len: int = 128, version: int | None = 0) -> TorchEngine:
        engine = TorchEngine(self.path, device="cpu", dtype=torch.float32, slots=slots, max_len=max_len)
        if version is not None:
            engine.load_weights(version, self.weights(version), "abort")
        return engine

    def logprobs(self, version: int, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Of each answer token, by one full pass in float64."""
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logits = self.model(version)(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()

    def greedy(self, version: int, prompt: Sequence[int], tokens: int) -> list[int]:
        ids, model = list(prompt), self.model(version)
        with torch.no_grad():
            for _ in range(tokens):
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="module", params=list(CONFIGS))
def any_policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return make_policy(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return make_policy("qwen3, tied", tmp_path_factory.mktemp("model"))


def make_policy(kind: str, path: Path) -> Policy:
    config = CONFIGS[kind]()
    config.save_pretrained(path)
    return Policy(path, config)


def request(id: str, prompt: Sequence[int], budget: int = 14, temperature: float = 0.0, **more: Any) -> Request:
    return Request(id, prompt, budget, temperature, **more)


def finish(engine: Engine) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    for _ in range(10_000):
        if not engine.has_work():
            return done
        done |= {c.id: c for c in engine.step()}
    raise AssertionError("the engine does not end")


def resumed(request: Request, partial: Completion) -> Request:
    return Request(
        request.id,
        request.prompt,
        request.max_new_tokens,
        request.temperature,
        seed=request.seed,
        prefix_tokens=partial.tokens.tolist(),
        prefix_logprobs=partial.logprobs.tolist(),
        prefix_spans=partial.spans,
    )


PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], list(range(1, 40)), [8])


# ---- numbers


def test_the_llama_family_takes_the_fused_path_and_others_transformers_own(any_policy: Policy) -> None:
    expected = TransformersForward if "cohere" in type(any_policy.config).__name__.lower() else FusedForward
    assert isinstance(any_policy.engine().forward, expected)


def test_logprobs_equal_a_full_forward_pass_in_float64(any_policy: Policy) -> None:
    engine = any_policy.engine(slots=8)
    requests = [request(f"{g}/{i}", p, 9 + 7 * i, 0.8, seed=5) for g, p in enumerate(PROMPTS) for i in range(4)]
    engine.add(requests)
    done = finish(engine)
    for r in requests:
        c = done[r.id]
        assert (len(c.tokens), c.finish, c.spans) == (r.max_new_tokens, "length", [(0, r.max_new_tokens)])
        np.testing.assert_allclose(c.logprobs, any_policy.logprobs(0, r.prompt, c.tokens.tolist(), 0.8), atol=1e-5)
    assert engine.generated_tokens == sum(r.max_new_tokens for r in requests)


def test_greedy_answers_equal_the_reference_continuation_with_fewer_slots_than_requests(any_policy: Policy) -> None:
    engine = any_policy.engine(slots=3)
    engine.add([request(f"{g}/{i}", p, 5 + 6 * i) for g, p in enumerate(PROMPTS) for i in range(3)])
    done = finish(engine)
    for g, prompt in enumerate(PROMPTS):
        expected = any_policy.greedy(0, prompt, 17)
        assert [done[f"{g}/{i}"].tokens.tolist() for i in range(3)] == [expected[: 5 + 6 * i] for i in range(3)]


def test_requests_with_different_sampling_settings_share_a_batch(policy: Policy) -> None:
    engine = policy.engine()
    engine.add(
        [
            request("greedy/0", PROMPTS[0]),
            request("cool/0", PROMPTS[0], temperature=0.5),
            request("warm/0", PROMPTS[0], temperature=1.3),
            request("one/0", PROMPTS[0], temperature=1.0, top_k=1),
            request("tiny nucleus/0", PROMPTS[0], temperature=1.0, top_p=1e-6),
        ]
    )
    done = finish(engine)
    greedy = policy.greedy(0, PROMPTS[0], 14)
    for id, temperature in (("greedy/0", 1.0), ("cool/0", 0.5), ("warm/0", 1.3)):
        expected = policy.logprobs(0, PROMPTS[0], done[id].tokens.tolist(), temperature)
        np.testing.assert_allclose(done[id].logprobs, expected, atol=1e-5)
    for id in ("greedy/0", "one/0", "tiny nucleus/0"):
        assert done[id].tokens.tolist() == greedy
    assert done["one/0"].logprobs.tolist() == [0.0] * 14, "the only candidate is certain"


def test_an_identical_prompt_is_prefilled_once(policy: Policy) -> None:
    engine = policy.engine()
    engine.add([request(f"a/{i}", PROMPTS[0], temperature=1.0) for i in range(8)])
    done = finish(engine)
    assert engine.prefilled_tokens == len(PROMPTS[0])
    assert len({tuple(c.tokens.tolist()) for c in done.values()}) > 1


def test_a_stream_depends_on_seed_and_id_not_on_the_company(policy: Policy) -> None:
    alone, crowded, other_seed = policy.engine(slots=1), policy.engine(slots=6), policy.engine()
    alone.add([request("a/3", PROMPTS[1], temperature=1.0, seed=11)])
    crowded.add([request(f"a/{i}", PROMPTS[1], 14 - i, temperature=1.0, seed=11) for i in (0, 1, 2)])
    crowded.step()
    crowded.add([request(f"a/{i}", PROMPTS[1], temperature=1.0, seed=11) for i in (3, 4)])
    other_seed.add([request("a/3", PROMPTS[1], temperature=1.0, seed=12)])
    expected = finish(alone)["a/3"].tokens.tolist()
    assert finish(crowded)["a/3"].tokens.tolist() == expected
    assert finish(other_seed)["a/3"].tokens.tolist() != expected


# ---- ends


def test_an_answer_ends_with_the_models_end_of_sequence_or_a_requested_stop_token(policy: Policy, tmp_path: Path) -> None:
    policy.config.save_pretrained(tmp_path)
    greedy = policy.greedy(0, PROMPTS[0], 14)
    last, middle = greedy[9], greedy[4]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [last, 60]}))
    engine = Policy(tmp_path, policy.config).engine()
    engine.add([request("eos/0", PROMPTS[0]), request("stop/0", PROMPTS[0], stop_token_ids=frozenset({middle, 59}))])
    done = finish(engine)
    for id, token in (("eos/0", last), ("stop/0", middle)):
        assert done[id].tokens.tolist() == greedy[: greedy.index(token) + 1]
        assert done[id].finish == "stop"


def test_what_can_never_run_fails_alone(policy: Policy) -> None:
    engine = policy.engine(max_len=40)
    bad = {
        "too long": request("too long", [1] * 30, 11),
        "empty": request("empty", []),
        "vocabulary": request("vocabulary", [VOCABULARY]),
        "prefix": request("prefix", [1], prefix_tokens=[2], prefix_logprobs=[], prefix_spans=[(0, 1)]),
        "sampling distribution": request("sampling distribution", [1], temperature=float("nan")),
    }
    engine.add([*bad.values(), request("good", PROMPTS[0])])
    done = finish(engine)
    assert done["good"].tokens.tolist() == policy.greedy(0, PROMPTS[0], 14)
    for word in bad:
        assert done[word].finish == "failed"
        assert word == "too long" or word in done[word].error
    assert "max_len = 40" in done["too long"].error


class LongPromptsRunOutOfMemory:
    """A Forward that cannot prefill more than 20 tokens."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def prefill(self, ids_PL: torch.Tensor, last_P: torch.Tensor) -> torch.Tensor:
        if ids_PL.shape[1] > 20:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return self.forward.prefill(ids_PL, last_P)

    def decode(self, ids_B: torch.Tensor, pos_B: torch.Tensor) -> torch.Tensor:
        return self.forward.decode(ids_B, pos_B)


def test_a_prefill_that_fails_fails_its_prompts_and_the_running_ones_go_on(policy: Policy) -> None:
    engine = policy.engine()
    engine.forward = LongPromptsRunOutOfMemory(engine.forward)
    engine.add([request("a/0", PROMPTS[0])])
    engine.step()
    engine.add([request("long/0", PROMPTS[2]), request("long/1", PROMPTS[2])])
    done = finish(engine)
    assert done["a/0"].tokens.tolist() == policy.greedy(0, PROMPTS[0], 14)
    assert {done[f"long/{i}"].finish for i in (0, 1)} == {"failed"}
    assert "20 GiB" in done["long/0"].error


def test_an_id_in_use_is_refused_and_nothing_of_that_call_is_queued(policy: Policy) -> None:
    engine = policy.engine()
    engine.add([request("a/0", [1])])
    with pytest.raises(InvalidArgumentError, match="a/0"):
        engine.add([request("b/0", [1]), request("a/0", [1])])
    assert set(finish(engine)) == {"a/0"}


def test_progress_shows_the_tokens_so_far(policy: Policy) -> None:
    engine = policy.engine(slots=1)
    engine.add([request("a/0", PROMPTS[0]), request("b/0", PROMPTS[0])])
    for _ in range(3):
        engine.step()
    assert engine.progress("a/0").tokens.tolist() == policy.greedy(0, PROMPTS[0], 3)
    assert engine.progress("b/0").tokens.size == 0
    with pytest.raises(NotFoundError):
        engine.progress("c/0")


# ---- abort and continue


def test_an_aborted_answer_continues_elsewhere_as_if_nothing_had_happened(any_policy: Policy) -> None:
    requests = [request(f"{g}/{i}", p, 14, 0.7 * i, seed=3) for g, p in enumerate(PROMPTS) for i in range(2)]
    whole, first, second = any_policy.engine(), any_policy.engine(), any_policy.engine()
    for engine in (whole, first):
        engine.add(requests)
    for _ in range(5):
        first.step()
    partial = {c.id: c for c in first.abort()}
    assert not first.has_work()
    assert {(len(c.tokens), c.finish) for c in partial.values()} == {(5, "aborted")}
    second.add([resumed(r, partial[r.id]) for r in requests])
    done, expected = finish(second), finish(whole)
    for r in requests:
        assert done[r.id].tokens.tolist() == expected[r.id].tokens.tolist()
        np.testing.assert_allclose(done[r.id].logprobs, expected[r.id].logprobs, atol=1e-5)


def test_aborting_some_leaves_the_others_running(policy: Policy) -> None:
    engine = policy.engine(slots=4)
    engine.add([request(f"{g}/0", p) for g, p in enumerate(PROMPTS)] + [request("waits/0", [5])])
    engine.step()
    gone = engine.abort(["1/0", "waits/0", "unknown"])
    assert {c.id: len(c.tokens) for c in gone} == {"1/0": 1, "waits/0": 0}
    done = finish(engine)
    assert {id: c.tokens.tolist() for id, c in done.items()} == {f"{g}/0": policy.greedy(0, p, 14) for g, p in enumerate(PROMPTS) if g != 1}


def test_c12_the_budget_counts_the_prefix_and_the_prefix_comes_back_unchanged(policy: Policy) -> None:
    engine = policy.engine(version=4)
    prefix: dict[str, Any] = {"prefix_tokens": [7, 8, 9], "prefix_logprobs": [-0.5, -1.25, -3.0], "prefix_spans": [(2, 1), (3, 2)]}
    engine.add([request("a/0", PROMPTS[0], 5, **prefix), request("full/0", PROMPTS[0], 3, **prefix)])
    engine.add([request("over/0", PROMPTS[0], 5, stop_token_ids=frozenset({9}), **prefix)])
    done = finish(engine)
    assert done["a/0"].tokens.tolist() == [7, 8, 9, *policy.greedy(4, [*PROMPTS[0], 7, 8, 9], 2)]
    assert done["a/0"].logprobs[:3].tolist() == [-0.5, -1.25, -3.0]
    assert done["a/0"].spans == [(2, 1), (3, 2), (4, 2)]
    assert (done["full/0"].tokens.tolist(), done["full/0"].finish) == ([7, 8, 9], "length")
    assert (done["over/0"].tokens.tolist(), done["over/0"].finish) == ([7, 8, 9], "stop")


# ---- weights


def swapped(policy: Policy, how: LoadPolicy) -> dict[str, Completion]:
    """14 tokens, of which 8 under version 0 and 6 under version 1."""
    engine = policy.engine()
    engine.add([request(f"{g}/{i}", p, 14, 1.0) for g, p in enumerate(PROMPTS) for i in range(2)])
    for _ in range(8):
        engine.step()
    engine.load_weights(1, policy.weights(1), how)
    return finish(engine)


def test_after_an_abort_update_new_tokens_equal_a_full_pass_of_the_new_weights(any_policy: Policy) -> None:
    for id, c in swapped(any_policy, "abort").items():
        prompt = PROMPTS[int(id[0])]
        assert c.spans == [(0, 8), (1, 6)]
        np.testing.assert_allclose(c.logprobs[:8], any_policy.logprobs(0, prompt, c.tokens.tolist())[:8], atol=1e-5)
        np.testing.assert_allclose(c.logprobs[8:], any_policy.logprobs(1, prompt, c.tokens.tolist())[8:], atol=1e-5)


def test_after_an_in_flight_update_new_tokens_see_the_old_keys_and_values(any_policy: Policy) -> None:
    for id, c in swapped(any_policy, "in_flight").items():
        prompt, tokens = PROMPTS[int(id[0])], c.tokens.tolist()
        assert c.spans == [(0, 8), (1, 6)]
        np.testing.assert_allclose(c.logprobs[:8], any_policy.logprobs(0, prompt, tokens)[:8], atol=1e-5)
        np.testing.assert_allclose(c.logprobs[8:], mixed_logprobs(any_policy, prompt, tokens), atol=1e-5)
        assert np.abs(c.logprobs[8:] - any_policy.logprobs(1, prompt, tokens)[8:]).max() > 1e-3


def mixed_logprobs(policy: Policy, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """Of tokens 8.. by version 1 over the cache version 0 made of prompt + tokens[:7]; token 7 is fed to version 1."""
    with torch.no_grad():
        old = policy.model(0)(input_ids=torch.tensor([[*prompt, *tokens[:7]]]), use_cache=True)
        cache = old.cache if "cache" in old else old.past_key_values
        keyword = {"cache" if "cache" in old else "past_key_values": cache}
        new = policy.model(1)(input_ids=torch.tensor([tokens[7:-1]]), use_cache=True, **keyword)
    return new.logits[0].log_softmax(-1).gather(-1, torch.tensor(tokens[8:])[:, None])[:, 0].numpy()


def test_the_same_version_number_of_a_newer_trainer_joins_the_span(policy: Policy) -> None:
    engine = policy.engine()
    engine.add([request("a/0", PROMPTS[0])])
    engine.step()
    engine.load_weights(0, policy.weights(0), "in_flight")
    assert finish(engine)["a/0"].spans == [(0, 14)]


def test_weights_are_copied(policy: Policy) -> None:
    engine, weights = policy.engine(version=None), policy.weights(0)
    engine.load_weights(0, weights, "in_flight")
    for tensor in weights.values():
        tensor.fill_(torch.nan)
    engine.add([request("a/0", PROMPTS[0])])
    assert finish(engine)["a/0"].tokens.tolist() == policy.greedy(0, PROMPTS[0], 14)


@pytest.mark.parametrize("given", ["both names", "embedding only", "head only"])
def test_a_tied_matrix_may_come_under_either_of_its_names(policy: Policy, given: str) -> None:
    engine, weights = policy.engine(version=None), policy.weights(0)
    if given != "both names":
        del weights["lm_head.weight" if given == "embedding only" else "model.embed_tokens.weight"]
    engine.load_weights(0, weights, "in_flight")
    engine.add([request("a/0", PROMPTS[0])])
    assert finish(engine)["a/0"].tokens.tolist() == policy.greedy(0, PROMPTS[0], 14)


def test_weights_that_do_not_fit_are_named_and_the_old_ones_stay_whole(any_policy: Policy) -> None:
    engine, broken = any_policy.engine(), any_policy.weights(1)
    del broken["model.norm.weight"]
    broken["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 32)
    broken["model.extra"] = torch.zeros(1)
    with pytest.raises(InvalidArgumentError) as err:
        engine.load_weights(1, broken, "abort")
    for part in ("model.norm.weight is missing", "up_proj.weight is [3, 32] instead of [48, 32]", "model.extra is not"):
        assert part in err.value.message
    engine.add([request("a/0", PROMPTS[0])])
    done = finish(engine)
    assert (done["a/0"].tokens.tolist(), done["a/0"].spans) == (any_policy.greedy(0, PROMPTS[0], 14), [(0, 14)])


def test_nothing_runs_before_the_first_weights(policy: Policy) -> None:
    engine = policy.engine(version=None)
    engine.add([request("a/0", PROMPTS[0])])
    assert engine.version == NO_VERSION
    with pytest.raises(RefusedError, match="no weights"):
        engine.step()


def test_weights_that_are_not_finite_fail_their_answers_and_poison_no_later_one(any_policy: Policy) -> None:
    engine = any_policy.engine(slots=2)
    engine.add([request("a/0", PROMPTS[2]), request("b/0", PROMPTS[0])])
    engine.step()
    engine.load_weights(1, {n: torch.full_like(t, torch.nan) for n, t in any_policy.weights(0).items()}, "in_flight")
    failed = engine.step()
    assert {(c.id, c.finish, len(c.tokens)) for c in failed} == {("a/0", "failed", 1), ("b/0", "failed", 1)}
    assert "not finite" in failed[0].error
    engine.load_weights(2, any_policy.weights(2), "in_flight")
    engine.add([request("c/0", PROMPTS[1])])
    assert finish(engine)["c/0"].tokens.tolist() == any_policy.greedy(2, PROMPTS[1], 14)


# ---- models


def test_a_model_with_a_sliding_window_is_refused_by_name(tmp_path: Path) -> None:
    MistralConfig(**SHAPE, **HEADS, sliding_window=16).save_pretrained(tmp_path)
    with pytest.raises(InvalidArgumentError, match="sliding window of 16"):
        TorchEngine(tmp_path, device="cpu", dtype=torch.float32, slots=2, max_len=64)


def test_a_model_with_other_layer_kinds_is_refused_by_name(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"]
    Qwen3Config(**SHAPE, **HEADS, head_dim=16, use_sliding_window=True, layer_types=kinds).save_pretrained(tmp_path)
    with pytest.raises(InvalidArgumentError, match="sliding_attention"):
        TorchEngine(tmp_path, device="cpu", dtype=torch.float32, slots=2, max_len=64)


def test_a_model_that_attends_in_a_way_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(InvalidArgumentError, match="BloomForCausalLM"):
        TorchEngine(tmp_path, device="cpu", dtype=torch.float32, slots=2, max_len=64)


def test_bfloat16_stays_near_the_float64_numbers(any_policy: Policy) -> None:
    engine = TorchEngine(any_policy.path, device="cpu", dtype=torch.bfloat16, slots=4, max_len=128)
    engine.load_weights(0, any_policy.weights(0), "abort")
    engine.add([request("a/0", PROMPTS[0], temperature=1.0)])
    answer = finish(engine)["a/0"]
    assert answer.logprobs.dtype == np.float32
    np.testing.assert_allclose(answer.logprobs, any_policy.logprobs(0, PROMPTS[0], answer.tokens.tolist()), atol=0.1)


def test_answers_end_where_the_model_has_no_more_positions(policy: Policy) -> None:
    engine = policy.engine(max_len=10_000)
    assert engine.max_len == SHAPE["max_position_embeddings"]
    engine.add([request("fits/0", PROMPTS[0], 120), request("too long/0", PROMPTS[0], 121)])
    done = finish(engine)
    assert done["fits/0"].tokens.tolist() == policy.greedy(0, PROMPTS[0], 120)
    assert done["too long/0"].finish == "failed"


# ---- any order of calls


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(1, 12)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("load"), st.integers(0, 1), st.integers(0, 1)),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_whatever_the_order_of_calls_every_token_is_the_greedy_one_of_its_version(
    operations: list[tuple[str, int, int]], shared_engine: TorchEngine, oracle: Oracle
) -> None:
    engine, started = shared_engine, 0
    answers: dict[str, Completion] = {}
    prompts: dict[str, Sequence[int]] = {}
    engine.load_weights(0, oracle.weights[0], "abort")
    for name, a, b in operations:
        if name == "add":
            prompts[f"{started}/0"] = PROMPTS[a]
            engine.add([request(f"{started}/0", PROMPTS[a], b)])
            started += 1
        elif name == "step":
            answers |= {c.id: c for _ in range(a) for c in engine.step()}
        elif name == "abort":
            answers |= {c.id: c for c in engine.abort([f"{max(0, started - 1 - a)}/0"])}
        else:
            engine.load_weights(a, oracle.weights[a], "abort")
        assert engine.num_running <= engine.slots
    answers |= finish(engine)
    assert answers.keys() == prompts.keys()
    for id, c in answers.items():
        oracle.check(prompts[id], c)


class Oracle:
    """Greedy next tokens by full passes, remembered."""

    def __init__(self, policy: Policy) -> None:
        self.weights = [policy.weights(v) for v in (0, 1)]
        self._models = [policy.model(v) for v in (0, 1)]
        self._next: dict[tuple[int, ...], int] = {}

    def check(self, prompt: Sequence[int], answer: Completion) -> None:
        versions = [v for v, n in answer.spans for _ in range(n)]
        text, tokens = list(prompt), answer.tokens.tolist()
        assert len(versions) == len(tokens) == len(answer.logprobs)
        for version, token in zip(versions, tokens, strict=True):
            assert token == self.next(version, text)
            text.append(token)

    def next(self, version: int, text: list[int]) -> int:
        key = (version, *text)
        if key not in self._next:
            with torch.no_grad():
                self._next[key] = int(self._models[version](input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax())
        return self._next[key]


@pytest.fixture(scope="module")
def shared_engine(policy: Policy) -> TorchEngine:
    """One for all examples: what an earlier one left in the cache must not matter."""
    return policy.engine(slots=3)


@pytest.fixture(scope="module")
def oracle(policy: Policy) -> Oracle:
    return Oracle(policy)
