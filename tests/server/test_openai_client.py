"""OpenAI's own client, as people use it: sync, async, streams, completions with ids and echo."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
openai = pytest.importorskip("openai", reason="pip install openai==3.54.0")

from tests.pacing import PATIENCE_S  # noqa: E402
from tests.server.local_server import LocalServer  # noqa: E402

ROOT = Path(__file__).parent.parent.parent
CHAT: Any = [{"role": "user", "content": "How do I sort a list?"}]
SERVING = (ROOT / "docs" / "serving.md").read_text()


@pytest.fixture(scope="module")
def client(served: LocalServer) -> Any:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        yield client


def test_a_chat(client: Any) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=8, n=2, seed=3, logprobs=True, top_logprobs=2,
        extra_body={"top_k": 5, "return_token_ids": True},
    )  # fmt: skip
    assert len(answer.choices) == 2
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert len(answer.choices[0].token_ids) <= 8


def test_a_streamed_chat(client: Any) -> None:
    options = {"max_tokens": 60, "temperature": 0, "stop": ["("]}
    whole = client.chat.completions.create(model="demo", messages=CHAT, **options)
    for stream_options in ({"include_usage": True}, None):
        extra = {} if stream_options is None else {"stream_options": stream_options}
        chunks = list(
            client.chat.completions.create(
                model="demo", messages=CHAT, stream=True, **options, **extra
            )
        )
        pieces = [choice.delta.content or "" for c in chunks for choice in c.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    with client.chat.completions.stream(model="demo", messages=CHAT, **options) as stream:
        assert stream.get_final_completion().choices[0].message.content == "".join(pieces)


def test_completions_of_ids_with_echo(client: Any) -> None:
    answer = client.completions.create(
        model="demo", prompt=[[5, 6, 7], [8, 9]], max_tokens=1, echo=True, logprobs=1,
        temperature=0, seed=1234,
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [len(choice.logprobs.token_logprobs) for choice in answer.choices] == [4, 3]
    assert answer.choices[0].logprobs.token_logprobs[0] is None


def test_asyncio(served: LocalServer) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:

            async def one(number: int) -> str:
                stream = await client.completions.create(
                    model="demo", prompt=f"def f{number}(", max_tokens=6, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return list(await asyncio.gather(*map(one, range(8))))

    assert all(isinstance(text, str) for text in asyncio.run(ask()))


def test_errors_have_their_types(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="function is required"):
        client.chat.completions.create(model="demo", messages=CHAT, tools=[{"type": "function"}])
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="other", messages=CHAT)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "radixserve"


def test_the_curl_lines_of_the_page(served: LocalServer) -> None:
    block = re.findall(r"```bash\n(.*?)```", SERVING, re.DOTALL)[0]
    script = block.replace("localhost:8000", served.url.removeprefix("http://"))
    done = subprocess.run(
        ["bash", "-ec", script], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert '"object":"chat.completion"' in done.stdout
    assert "data: [DONE]" in done.stdout
    assert '"reason":"diverged"' in done.stdout
