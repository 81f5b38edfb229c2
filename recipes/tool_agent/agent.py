"""An agent that reads instruments in cities: a loop over OpenAI's chat completions with tools.

Of asyncrl it knows three addresses: of sessions, of the model in a session, and of rewards.
"""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import httpx
import openai

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": CITY}}
    for name in ("wind", "rain", "heat", "snow")
]
CALL_S = 60.0


def measure(ticket: str, tool: str, city: str) -> str:
    """Return what an instrument shows: two digits, the same in all episodes of a group."""
    return f"{random.Random(f'{ticket} {tool} {city}').randrange(100):02d}"


def use_tool(ticket: str, call: Any) -> str:
    """Return the result of a call, or what is wrong with it."""
    try:
        return measure(ticket, call.function.name, json.loads(call.function.arguments)["city"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error!r}"


def answer(agent: openai.OpenAI, session: dict[str, Any]) -> str:
    """Return the model's answer, which may call a tool first."""
    messages: list[Any] = [*session["prompt"]]
    said = ask(agent, messages)
    if not said.tool_calls:
        return said.content or ""
    messages.append(said)
    for call in said.tool_calls:
        result = use_tool(session["ticket"], call)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ask(agent, messages).content or ""


def ask(agent: openai.OpenAI, messages: list[Any]) -> Any:
    """Return the model's next message."""
    return agent.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message


def run_episode(gateway: str, http: httpx.Client, client: openai.OpenAI) -> float | None:
    """Return the reward of one episode: 1 for what the right instrument shows in the right city, else 0.

    It is None if the learner has enough for now.
    """
    reply = http.post(f"{gateway}/sessions", json={"wait_s": 5})
    if reply.status_code == 503:
        return None
    session = reply.raise_for_status().json()
    reward = 0.0
    try:
        said = answer(client.with_options(base_url=session["base_url"]), session)
        reward = float(said == measure(session["ticket"], *session["ground_truth"]))
    except openai.BadRequestError as error:
        if error.type != "context_length_exceeded":  # else the call has used up the tokens of the episode
            raise
    key = {"Authorization": f"Bearer {session['key']}"}
    http.post(f"{gateway}/reward", json={"reward": reward}, headers=key).raise_for_status()
    return reward


def work(gateway: str, is_over: threading.Event) -> None:
    """Run episodes until the event is set; before the gateway is there, and when it is gone, wait for it."""
    client = openai.OpenAI(base_url=gateway, api_key="none", timeout=CALL_S, max_retries=0)
    with client, httpx.Client(timeout=CALL_S) as http:
        while not is_over.is_set():
            try:
                run_episode(gateway, http, client)
            except (httpx.HTTPError, openai.APIError):  # no gateway yet, or the episode has ended
                is_over.wait(0.5)
