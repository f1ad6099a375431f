"""Branches that generate and are scored together, and what they tell of themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from radixserve import Branch, InvalidRequest, Runtime, SamplingParams, Usage
from radixserve.api.branch import BranchQuery, generate_all, score_all
from tests.checkpoints import EOS_ID, make_checkpoint

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batches")
    return make_checkpoint(path, "llama", with_tokenizer=True, eos_ids=[EOS_ID, 10])


@pytest.fixture(params=[1, 16])
def rt(folder: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with Runtime(str(folder), num_pages=640 // request.param, page_size=request.param) as rt:
        yield rt
        rt.check()
        stats = rt.cache_stats()
        assert stats["sessions"] == stats["pages_private"] == stats["pages_locked"] == 0


def params(count: int = 8, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, **{"ignore_eos": True, "seed": 11, **fields})


def release(*branches: Branch) -> None:
    for branch in branches:
        branch.release()


def test_forks_draw_like_the_samples_of_n(rt: Runtime) -> None:
    with rt.branch(PROMPT) as root:
        kids = root.fork(5)
        outs = generate_all(kids, params())
        assert [out.usage.computed_tokens for out in outs] == [40, 1, 1, 1, 1]
        assert [kid.tokens.tolist() for kid in kids] == [[*PROMPT, *o.token_ids] for o in outs]
        again = generate_all(root.fork(2), params(seed=None))  # the runtime's own seeds
        assert again[0].token_ids != again[1].token_ids
        assert [o.usage.computed_tokens for o in again] == [1, 1]
        release(*kids)
    rt.flush_cache()
    samples = rt.generate(PROMPT, params(n=5))
    assert [out.token_ids for out in outs] == [out.token_ids for out in samples]


def test_they_run_side_by_side(rt: Runtime) -> None:
    with rt.branch(PROMPT) as root, rt.branch(PROMPT[:9]) as other:
        kids = [*root.fork(3), *other.fork(3), *root.fork(1)]
        kids[4].extend([9, 9])
        before = rt.cache_stats()["steps"]
        generate_all(kids, [params(20 + i) for i in range(7)])
        assert rt.cache_stats()["steps"] - before <= 26 + 6
        assert [kid.length for kid in kids] == [60, 61, 62, 32, 35, 34, 66]
        release(*kids)
    assert generate_all([]) == []


def test_each_keeps_its_own_hold_of_what_was_shared(folder: Path) -> None:
    """The first of the forks computed for all; when it is gone the others have it still."""
    for page_size in (1, 16):
        with Runtime(str(folder), num_pages=320 // page_size, page_size=page_size) as rt:
            with rt.branch(list(range(100))) as root:
                kids = root.fork(4)
            generate_all(kids, params())
            kept = kids.pop()
            release(*kids)
            for seed in range(8):
                rt.generate([seed, *range(90, 190)], params(2))
            assert kept.cached_len > 107 - page_size
            assert rt.cache_stats()["evicted_tokens"] > 0
            kept.release()
            assert rt.cache_stats()["sessions"] == 0
            rt.check()


def test_all_move_or_none(rt: Runtime) -> None:
    with rt.branch(PROMPT) as root:
        one, two = root.fork(2)
        for bad in ([one, two, one], [one, rt.branch("x")]):
            with pytest.raises(InvalidRequest):
                generate_all(bad, [params(), params(), params()] if bad[-1] is one else [params()])
        with pytest.raises(InvalidRequest, match="n=1"):
            generate_all([one, two], params(n=2))
        two.truncate(0)
        with pytest.raises(InvalidRequest, match="empty"):
            generate_all([one, two], params())
        two.release()
        with pytest.raises(InvalidRequest, match="released"):
            generate_all([one, two], params())
        assert one.length == 40
        assert len(generate_all([one], params())[0].token_ids) == 8
        one.release()


def test_one_runtime(folder: Path, rt: Runtime) -> None:
    with Runtime(str(folder), num_pages=200) as other:
        for together in (
            generate_all,
            lambda both: score_all([BranchQuery(b, [[1]]) for b in both]),
        ):
            with pytest.raises(InvalidRequest, match="same Runtime"):
                together([rt.branch([1, 2]), other.branch([1, 2])])


def test_scores_of_several(rt: Runtime) -> None:
    with rt.branch(PROMPT) as one, rt.branch("hello") as two:
        asks = [
            BranchQuery(one, [[7], [8, 9]]),
            BranchQuery(two, ["you"], more=" to "),
            BranchQuery(one, [PROMPT[30:]], length=30),
        ]
        found = score_all(asks)
        assert (one.length, two.length) == (40, 5)
        expected = [*rt.score(PROMPT, [[7], [8, 9]]), *rt.score("hello to ", ["you"]),
                    *rt.score(PROMPT[:30], [PROMPT[30:]])]  # fmt: skip
        scores = [score for several in found for score in several]
        assert [s.logprob for s in scores] == pytest.approx([s.logprob for s in expected], abs=1e-4)
        assert two.usage == found[1][0].usage
        assert one.usage.prompt_tokens == 40 + 41 + 39
        assert one.usage.cached_tokens + one.usage.computed_tokens == one.usage.prompt_tokens
        for length in (-1, 41, 2.5):
            with pytest.raises(InvalidRequest, match="length"):
                score_all([BranchQuery(one, [[7]], length)])  # type: ignore[arg-type]
    assert score_all([]) == []


def test_usage_adds_up(rt: Runtime) -> None:
    with rt.branch(PROMPT) as branch:
        assert branch.usage == Usage(0, 0, 0, 0)
        first = branch.generate(params()).usage
        second = [*branch.stream(params())][-1].completion
        assert second is not None
        third = branch.score([[5]])[0].usage
        assert first == Usage(40, 0, 40, 8)
        assert third == Usage(56, 55, 1, 0)
        assert branch.usage == Usage(40 + 48 + 56, 47 + 55, 40 + 1 + 1, 16)
        assert branch.fork()[0].usage == Usage(0, 0, 0, 0)


def test_what_a_branch_knows(rt: Runtime) -> None:
    with rt.branch("hello") as branch:
        branch.extend(" für")
        assert branch.text_from(0) == "hello für"
        assert branch.text_from(5) == " für"
        assert branch.text_from(branch.length) == ""
        assert branch.room == rt.max_seq_len - branch.length
        with pytest.raises(InvalidRequest, match="length"):
            branch.text_from(99)
        for token, ends in ((EOS_ID, True), (10, True), (11, False)):
            branch.extend([token])
            assert branch.has_ended == ends
        branch.truncate(0)
        assert not branch.has_ended
