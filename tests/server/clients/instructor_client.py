"""instructor, unchanged: objects out of calls, whole and while they grow. See run.py."""

from __future__ import annotations

import os
from typing import Any, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

URL = os.environ["RADIXSERVE_URL"] + "/v1"
CHAT: Any = [{"role": "user", "content": "Plan a journey to Rome."}]


class Stop(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


class Plan(BaseModel):
    """Where to go"""

    model_config = ConfigDict(extra="forbid")
    season: Literal["spring", "autumn"]
    stops: list[Stop] = Field(min_length=1, max_length=2)


def main() -> None:
    openai = OpenAI(base_url=URL, api_key="none")
    options: Any = {"model": "demo", "messages": CHAT, "max_tokens": 2_000, "max_retries": 0,
                    "response_model": Plan, "temperature": 0}  # fmt: skip
    client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
    plan, raw = client.chat.completions.create_with_completion(**options)
    assert isinstance(plan, Plan), plan
    assert raw.choices[0].finish_reason == "tool_calls"
    *_, last = client.chat.completions.create_partial(**options)
    assert last.model_dump() == plan.model_dump()
    print("instructor: TOOLS, whole and partial")
    client = instructor.from_openai(openai, mode=instructor.Mode.JSON_SCHEMA)
    plan = client.chat.completions.create(**options)
    assert isinstance(plan, Plan), plan
    print("instructor: JSON_SCHEMA")


if __name__ == "__main__":
    main()
