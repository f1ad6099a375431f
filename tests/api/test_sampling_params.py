"""Parameters that change what may be sampled, where a text ends and how it is cut: on both runners,
with the cache cold and warm, alone and in a batch."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixserve import Completion, InvalidRequest, RequestFailed, Runtime, SamplingParams
from tests.checkpoints import EOS_ID, make_checkpoint
from tests.runner.on_device import DeviceRuntime

PROMPT = list(range(40, 80))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("params"), "llama", with_tokenizer=True)


@pytest.fixture(scope="module", params=[Runtime, DeviceRuntime])
def shared_rt(folder: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with request.param(str(folder), num_pages=4096) as rt:
        yield rt


@pytest.fixture
def rt(shared_rt: Runtime) -> Iterator[Runtime]:
    shared_rt.flush_cache()
    yield shared_rt
    shared_rt.check()
    assert shared_rt.cache_stats()["running"] == 0


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "seed": 3, **fields}
    )


def ids_of(rt: Runtime, **fields: Any) -> list[int]:
    found: Completion = rt.generate(PROMPT, params(**fields))
    return found.token_ids


def letters(rt: Runtime) -> list[int]:
    """A token for each letter from a to z: all words are valid text then."""
    assert rt.tokenizer is not None
    return rt.tokenizer.encode("abcdefghijklmnopqrstuvwxyz")


def never_repeat(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """What a repetition penalty without end would do to the output, in a caller's function."""
    logits[output] = -torch.inf
    return logits


def test_allowed_tokens(rt: Runtime) -> None:
    plain = ids_of(rt)
    allowed = sorted(set(range(65, 91)) - set(plain))
    found = ids_of(rt, allowed_token_ids=allowed)
    assert set(found) <= set(allowed)
    assert set(ids_of(rt, allowed_token_ids=allowed, temperature=5.0)) <= set(allowed)
    assert ids_of(rt, allowed_token_ids=[70]) == [70] * 12
    assert ids_of(rt, allowed_token_ids=range(288)) == plain


def test_logit_bias(rt: Runtime) -> None:
    plain = ids_of(rt)
    assert ids_of(rt, logit_bias={99: 100}) == [99] * 12
    found = ids_of(rt, logit_bias={plain[0]: -100.0})
    assert plain[0] not in found
    assert ids_of(rt, logit_bias={}) == plain
    both = ids_of(rt, logit_bias={99: 100, 98: 100.0}, frequency_penalty=2.0)
    assert {98, 99} == set(both)  # the bias comes before the penalties, which take turns


def test_logprobs_of_named_tokens(rt: Runtime) -> None:
    every = rt.generate(PROMPT, params(max_tokens=3, logprobs=100))
    named = rt.generate(PROMPT, params(max_tokens=3, logprob_token_ids=[9, 7, 9]))
    assert every.token_ids == named.token_ids
    assert named.logprobs == pytest.approx(every.logprobs, abs=1e-4)
    assert [list(top) for top in named.top_logprobs] == [[9, 7]] * 3
    for top, best in zip(named.top_logprobs, every.top_logprobs, strict=True):
        for token_id in set(top) & set(best):
            assert top[token_id] == pytest.approx(best[token_id], abs=1e-4)
    for wrong in ({"logprob_token_ids": []}, {"logprob_token_ids": [1], "logprobs": 2}):
        with pytest.raises(InvalidRequest, match="logprob_token_ids"):
            params(**wrong)
    with pytest.raises(InvalidRequest, match=r"logprob_token_ids .* out of range"):
        rt.generate(PROMPT, params(logprob_token_ids=[10**6]))


def test_bias_and_masks_leave_logprobs_as_they_are(rt: Runtime) -> None:
    plain = rt.generate(PROMPT, params(max_tokens=1, logprobs=5))
    changed = rt.generate(
        PROMPT, params(max_tokens=1, logprobs=5, logit_bias={7: 50.0}, allowed_token_ids=[7, 8])
    )
    assert changed.token_ids == [7]
    assert changed.top_logprobs[0] == pytest.approx(plain.top_logprobs[0], abs=1e-4)
    assert changed.logprobs[0] < plain.logprobs[0]


def test_bad_words_of_one_and_several_tokens(rt: Runtime) -> None:
    """The tokenizer has a token a byte: a word of n bytes has n tokens."""
    plain = rt.generate(PROMPT, params(allowed_token_ids=letters(rt), max_tokens=30)).text
    for start, size in ((4, 1), (9, 2), (3, 3), (11, 5)):
        word = plain[start : start + size]
        out = rt.generate(
            PROMPT, params(allowed_token_ids=letters(rt), max_tokens=30, bad_words=[word])
        )
        at = plain.index(word)
        assert word not in out.text
        assert out.text[: at + size - 1] == plain[: at + size - 1]
        assert out.text[at + size - 1] != plain[at + size - 1]
    every = [plain[at : at + 2] for at in range(29)]
    out = rt.generate(PROMPT, params(allowed_token_ids=letters(rt), max_tokens=30, bad_words=every))
    assert not any(word in out.text for word in every)


def test_logits_processors(rt: Runtime) -> None:
    found = ids_of(rt, logits_processors=[never_repeat], max_tokens=40)
    assert len(set(found)) == 40
    seen = []

    def force(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((len(prompt), len(output)))
        return torch.full_like(logits, -9.0).index_fill_(0, torch.tensor([len(output)]), 9.0)

    assert ids_of(rt, logits_processors=(force,), max_tokens=4) == [0, 1, 2, 3]
    assert seen == [(40, 0), (40, 1), (40, 2), (40, 3)]
    assert ids_of(rt, logits_processors=[force, never_repeat], max_tokens=3) == [0, 1, 2]


def test_a_processor_that_fails_ends_its_request_only(rt: Runtime) -> None:
    def fails(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == 3:
            raise KeyError("mine")
        return logits

    async def main() -> list[Any]:
        each = [params(logits_processors=[fails]), params(), params(temperature=0.9)]
        runs = (rt.agenerate(PROMPT, one) for one in each)
        return await asyncio.gather(*runs, return_exceptions=True)

    bad, greedy, sampled = asyncio.run(main())
    assert isinstance(bad, RequestFailed)
    assert "a function of logits_processors failed: KeyError('mine')" in str(bad)
    assert isinstance(bad.__cause__, KeyError)
    assert greedy.token_ids == ids_of(rt)
    assert sampled.token_ids == ids_of(rt, temperature=0.9)
    with pytest.raises(RequestFailed, match=r"must return a tensor \[288\] of logits, got \[1\]"):
        rt.generate(PROMPT, params(logits_processors=[lambda _, logits: logits[:1]]))
    with pytest.raises(RequestFailed, match="got NoneType"):
        rt.generate(PROMPT, params(logits_processors=[lambda *_: None]))


def test_nothing_left_to_draw(rt: Runtime) -> None:
    assert rt.tokenizer is not None
    with pytest.raises(RequestFailed, match="no token can be sampled"):
        rt.generate(PROMPT, params(allowed_token_ids=[65], bad_words=[rt.tokenizer.decode([65])]))
    assert len(ids_of(rt)) == 12


def test_warm_cold_and_batched_answers_are_the_same(rt: Runtime) -> None:
    each = [
        params(max_tokens=20, **fields)
        for fields in (
            {},
            {"logit_bias": {70: 3.0, 71: -2.5}},
            {"bad_words": ["ab", "e", "t"], "temperature": 0.8},
            {"allowed_token_ids": range(60, 130), "temperature": 1.2, "bad_words": ["AAA", "zz"]},
            {"logits_processors": [never_repeat], "temperature": 0.7, "logprobs": 2},
            {"repetition_penalty": 1.4, "logit_bias": {5: 9.0}, "min_tokens": 4},
        )
    ]
    cold = []
    for one in each:
        rt.flush_cache()
        cold.append(rt.generate(PROMPT, one).token_ids)
    assert [rt.generate(PROMPT, one).token_ids for one in each] == cold
    together = rt.generate([PROMPT] * 12, each * 2)
    assert [out.token_ids for out in together] == cold * 2


def test_samples_take_them_along(rt: Runtime) -> None:
    outs = rt.generate(PROMPT, params(n=3, temperature=1.0, bad_words=["e"], logit_bias={65: 2.0}))
    alone = rt.generate(PROMPT, params(temperature=1.0, bad_words=["e"], logit_bias={65: 2.0}))
    assert outs[0].token_ids == alone.token_ids
    assert not any("e" in out.text for out in outs)


class TestTheEndOfTheText:
    def test_stop_reason(self, rt: Runtime) -> None:
        plain = rt.generate(PROMPT, params(allowed_token_ids=letters(rt), max_tokens=30))
        word, token = plain.text[5:8], plain.token_ids[9]
        base = {"allowed_token_ids": letters(rt), "max_tokens": 30}
        assert plain.stop_reason is None
        out = rt.generate(PROMPT, params(**base, stop=["?", word]))
        assert (out.finish_reason, out.stop_reason) == ("stop", word)
        out = rt.generate(PROMPT, params(**base, stop_token_ids=[token, 5]))
        assert (out.finish_reason, out.stop_reason) == ("stop", token)
        end = rt.generate(PROMPT, params(logit_bias={EOS_ID: 100}, ignore_eos=False))
        assert (end.finish_reason, end.stop_reason) == ("stop", None)
        *_, last = rt.stream(PROMPT, params(**base, stop=word))
        assert last.completion is not None
        assert last.completion.stop_reason == word

    def test_stop_strings_and_end_tokens_stay_in_the_text(self, rt: Runtime) -> None:
        base: dict[str, Any] = {"allowed_token_ids": letters(rt), "max_tokens": 30}
        plain = rt.generate(PROMPT, params(**base))
        word = plain.text[5:8]
        at = plain.text.index(word)
        base["include_stop_str_in_output"] = True
        out = rt.generate(PROMPT, params(**base, stop=word))
        assert out.text == plain.text[: at + 3]
        pieces = [chunk.text for chunk in rt.stream(PROMPT, params(**base, stop=word))]
        assert "".join(pieces) == out.text
        token = plain.token_ids[9]
        out = rt.generate(PROMPT, params(**base, stop_token_ids=[token]))
        assert out.text == plain.text[: plain.token_ids.index(token) + 1]
        # of two that begin at the same place the first one counts
        for stops in ([word, word[:2]], [word[:2], word]):
            out = rt.generate(PROMPT, params(**base, stop=[*stops, word + "?"]))
            assert out.stop_reason == (word[:2])
            assert out.text == plain.text[: at + 2]

    def test_special_tokens_in_the_text(self, rt: Runtime) -> None:
        fields: dict[str, Any] = {"logit_bias": {EOS_ID: 100}, "ignore_eos": False}
        assert rt.generate(PROMPT, params(**fields)).text == ""
        out = rt.generate(PROMPT, params(**fields, skip_special_tokens=False))
        assert out.text == ""  # an end token is not part of the text
        fields["include_stop_str_in_output"] = True
        assert rt.generate(PROMPT, params(**fields)).text == ""
        out = rt.generate(PROMPT, params(**fields, skip_special_tokens=False))
        name = rt.tokenizer.decode([EOS_ID], keep_special=True)  # type: ignore[union-attr]
        assert out.text == name != ""
        fields = {"logit_bias": {EOS_ID: 100}, "max_tokens": 2}
        assert rt.generate(PROMPT, params(**fields, skip_special_tokens=False)).text == name * 2
        assert rt.generate(PROMPT, params(**fields)).text == ""
        assert rt.generate(PROMPT, params(**fields, keep_special_ids=[EOS_ID])).text == name * 2
        assert rt.generate(PROMPT, params(**fields, keep_special_ids=[65])).text == ""
        pieces = rt.stream(PROMPT, params(**fields, keep_special_ids=[EOS_ID]))
        assert "".join(chunk.text for chunk in pieces) == name * 2

    def test_a_chat_goes_on_from_answers_with_their_end_token(self, folder: Path) -> None:
        def two_letters(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[EOS_ID if len(output) == 2 else 65] = 100.0
            return logits

        processors = [two_letters]
        fields: dict[str, Any] = {
            "ignore_eos": False,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "logits_processors": processors,
        }
        with Runtime(str(folder), num_pages=512) as rt:
            chats = [
                rt.chat(params=params(**fields)),
                rt.chat(params=params(logits_processors=processors, ignore_eos=False)),
            ]
            for chat in chats:
                for _ in range(2):
                    chat.send("hi")
            assert chats[0].history == chats[1].history
            assert chats[0].tokens.tolist() == chats[1].tokens.tolist()


class TestTruncation:
    def test_the_last_tokens_are_taken(self, rt: Runtime) -> None:
        out = rt.generate(PROMPT, params(truncate_prompt_tokens=7))
        assert out.usage.prompt_tokens == 7
        assert out.token_ids == rt.generate(PROMPT[-7:], params()).token_ids
        assert rt.generate(PROMPT, params(truncate_prompt_tokens=99)).usage.prompt_tokens == 40
        long = PROMPT * 20
        with pytest.raises(InvalidRequest, match="the prompt has 800 tokens"):
            rt.generate(long, params())
        out = rt.generate(long, params(truncate_prompt_tokens=-1))
        assert out.usage.prompt_tokens == rt.max_seq_len - 12
        assert len(out.token_ids) == 12
        with pytest.raises(InvalidRequest, match="leaves no prompt: max_tokens is 512 of 512"):
            rt.generate(long, params(truncate_prompt_tokens=-1, max_tokens=512))

    def test_not_of_a_branch(self, rt: Runtime) -> None:
        with (
            rt.branch(PROMPT) as branch,
            pytest.raises(InvalidRequest, match="truncate_prompt_tokens cannot be given"),
        ):
            branch.generate(params(truncate_prompt_tokens=3))


class TestBeams:
    def test_masks_and_words(self, rt: Runtime) -> None:
        fields: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
        allowed = letters(rt)
        outs = rt.beam_search(PROMPT, 3, allowed_token_ids=allowed, **fields)
        assert all(set(out.token_ids) <= set(allowed) for out in outs)
        word = outs[0].text[2:4]
        others = rt.beam_search(PROMPT, 3, allowed_token_ids=allowed, bad_words=[word], **fields)
        assert not any(word in out.text for out in others)
        biased = rt.beam_search(PROMPT, 2, logit_bias={97: 100.0}, **fields)
        assert biased[0].token_ids == [97] * 8
        assert biased[0].score > 0  # log-probabilities and bias, as penalties are counted

    def test_texts(self, rt: Runtime) -> None:
        fields: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "length_penalty": -5.0}
        allowed = letters(rt)
        word = rt.beam_search(PROMPT, 2, allowed_token_ids=allowed, **fields)[0].text[3:5]
        outs = rt.beam_search(
            *(PROMPT, 2), allowed_token_ids=allowed, stop=word, include_stop_str_in_output=True,
            **fields,
        )  # fmt: skip
        stopped = [out for out in outs if out.stop_reason == word]
        assert stopped
        assert all(out.text.endswith(word) for out in stopped)
        assert rt.beam_search(PROMPT, 2, truncate_prompt_tokens=5)[0].usage.prompt_tokens == 5

    def test_what_cannot_be_combined(self, rt: Runtime) -> None:
        with pytest.raises(InvalidRequest, match="logits_processors cannot be given"):
            rt.beam_search(PROMPT, 2, logits_processors=[never_repeat])
        with pytest.raises(
            InvalidRequest, match=r"beam_width must be at most 1 with .* among the 3"
        ):
            rt.beam_search(PROMPT, 4, allowed_token_ids=[65, 66, 67], ignore_eos=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": [1, 2]}, "logit_bias must be {token id: number}, got list"),
        ({"logit_bias": {"a": 1}}, "a token id of logit_bias must be an integer .*, got 'a'"),
        ({"logit_bias": {3: 101}}, "logit_bias of token 3 must be a number >= -100 and <= 100"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias of token 3 must be a number"),
        ({"allowed_token_ids": []}, "allowed_token_ids must name a token at least"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list of token ids, got 5"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be between 0 and"),
        ({"bad_words": "word"}, "bad_words must be a list of non-empty strings, got 'word'"),
        ({"bad_words": [""]}, "bad_words must be a list of non-empty strings"),
        ({"bad_words": ["a\ud800"]}, "bad_words is not valid Unicode text"),
        ({"stop": "a\ud800"}, "stop is not valid Unicode text"),
        ({"namespace": "a\ud800"}, "namespace is not valid Unicode text"),
        ({"logits_processors": [1]}, "logits_processors must be functions, got 1"),
        ({"logits_processors": never_repeat}, "logits_processors must be a list of functions"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be None, -1 or >= 1, got 0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be >= -1"),
        ({"keep_special_ids": "a"}, "keep_special_ids must be a list of token ids"),
        ({"keep_special_ids": [-1]}, "keep_special_ids must be"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be True or False"),
        ({"include_stop_str_in_output": None}, "include_stop_str_in_output must be True or False"),
    ],
)
def test_wrong_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**fields)


def test_values_outside_of_the_vocabulary(rt: Runtime) -> None:
    for fields in ({"logit_bias": {288: 1}}, {"allowed_token_ids": [1, 288]}):
        with pytest.raises(InvalidRequest, match=r"\[288\] are out of range: allowed are 0 to 287"):
            rt.generate(PROMPT, params(**fields))


def test_params_can_be_compared_hashed_and_sent() -> None:
    one = params(logit_bias={np.int64(5): np.float32(1.5)}, bad_words=("x",), allowed_token_ids={4})
    other = params(logit_bias={5: 1.5}, bad_words=["x"], allowed_token_ids=[4])
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == other


def test_without_a_tokenizer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with (
        Runtime(str(tmp_path), num_pages=256) as rt,
        pytest.raises(InvalidRequest, match="no tokenizer: bad_words cannot be found"),
    ):
        rt.generate(PROMPT, params(bad_words=["x"]))
