"""Many requests at once, some of them given up: nothing is lost, mixed up or kept."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

from dspine.api import LLM

MODEL = "tiny"
REQUESTS, ROWS, TOKENS = 200, 8, 24


def prompt_of(number: int) -> str:
    return f"{number} " + "abcdefgh"[: number % 8] * (1 + number % 5)


async def ask(client: openai.AsyncOpenAI, number: int) -> str | None:
    """The answer to prompt `number`, streamed by every second request; None where it was cancelled."""
    options: dict[str, Any] = {
        "model": MODEL, "prompt": prompt_of(number), "temperature": 0, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}
    }  # fmt: skip
    give_up = number % 10 == 3
    if number % 2:
        text = ""
        async with await client.completions.create(stream=True, **options) as stream:
            async for chunk in stream:
                text += chunk.choices[0].text
                if give_up and text:
                    return None
        return text
    reply = await client.completions.create(**options)
    return reply.choices[0].text


async def load(url: str) -> list[str | None]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        return await asyncio.gather(*(ask(client, number) for number in range(REQUESTS)))


def test_two_hundred_requests_at_once_a_tenth_of_them_cancelled(serve: Any, llm: LLM) -> None:
    expected = [
        result.text
        for result in llm.generate(
            [prompt_of(i) for i in range(REQUESTS)], max_new_tokens=TOKENS, ignore_eos=True, speculative=False
        )
    ]
    with serve(max_rows=ROWS) as server:
        memory = []
        for _ in range(2):
            answers = asyncio.run(load(server.url))
            cancelled = [i for i, text in enumerate(answers) if text is None]
            assert cancelled == list(range(3, REQUESTS, 10))
            assert all(text == expected[i] for i, text in enumerate(answers) if text is not None)
            server.wait_until_idle()
            engine = server.engine
            assert engine.live_requests == ()
            assert (engine.num_waiting, server.scheduler.num_unfinished) == (0, 0)
            caches = [cache for cache in (engine._cache, engine._draft_cache) if cache is not None]
            memory.append([cache.memory_bytes() for cache in caches])
            assert all(cache.rows == ROWS for cache in caches)
            assert server.scheduler._thread._jobs == {}
        assert memory[0] == memory[1], "the second wave needs no more than the first"
