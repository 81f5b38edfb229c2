"""A replica with a real engine and its gateway, a buffer, and a learner that takes what agents made."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.buffer import composition
from asyncrl.buffer.client import LearnerClient, ReplicaClient
from asyncrl.core.config.tree import Config
from asyncrl.core.experience import Group
from asyncrl.core.runtime.clock import SystemClock
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.service import ServiceContext
from asyncrl.core.staleness import PolicyVersion
from rollout_service.engine.metered import MeteredEngine
from rollout_service.engine.sglang.engine import SglangEngine, SglangSettings
from rollout_service.engine.sglang.process import PYTHON
from rollout_service.engine.vllm.engine import VllmEngine, VllmSettings
from rollout_service.gateway.gateway import Gateway, build_gateway
from rollout_service.replica.parts import ReplicaParts, ReplicaSettings
from rollout_service.replica.service import Replica
from rollout_service.tasks.tiny_text import CHAT_TEMPLATE, build_tokenizer, make_folder
from tests.rollout.data.files import load_prompts
from tests.rollout.engine.engine_parts import stage
from tests.rollout.replica.replica_parts import HandFedReceiver, running
from tests.waiting import wait_for

GROUP_SIZE = 2
MAX_TOKENS, MAX_PROMPT_TOKENS = 1400, 200
EOS = 2
END_PROBABILITY, NO_END_PROBABILITY = 0.05, 1e-7
QUESTION = "Wie geht es Dir?"
CALL_S = 60.0
ON_SGLANG = pytest.param(
    "sglang",
    marks=[
        pytest.mark.long,
        pytest.mark.timeout(900),
        pytest.mark.skipif(not PYTHON.exists(), reason="SGLang is not there: make setup LIST=sglang"),
    ],
)
ENGINES = ["vllm", ON_SGLANG]
"""Engines that a stage may have."""
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools[0]['function']['name'] }}<|im_end|>\n{% endif %}"
    + CHAT_TEMPLATE
)
"""That of the model, which shows the first tool's name as well."""


def make_text_model(folder: Path, seed: int, ends: bool = True) -> Any:
    """Return the byte model with telling distributions; it `ends` answers after some 20 tokens, or never."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            middle = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(middle + 0.15 * torch.randn(parameter.shape, generator=generator))
        direction = torch.sign(torch.randn(model.config.hidden_size, generator=generator))
        model.model.embed_tokens.weight += direction  # all hidden states have a part along it
        hidden_TD = model.model(torch.tensor([build_tokenizer()(QUESTION)["input_ids"]])).last_hidden_state[0]
        all_others = model.lm_head(hidden_TD).logsumexp(-1).mean()
        wanted = all_others + math.log(END_PROBABILITY if ends else NO_END_PROBABILITY)
        model.lm_head.weight[EOS] = wanted / (hidden_TD @ direction).mean() * direction
    return model


def make_text_folder(folder: Path) -> Path:
    """Make the folder of `make_text_model`."""
    model_folder = make_folder(folder)
    # What a model's maker recommends has no say: the log-probs would not be those of the policy.
    (model_folder / "generation_config.json").write_text('{"top_k": 3, "repetition_penalty": 1.3}')
    (model_folder / "chat_template.jinja").write_text(TEMPLATE)
    return model_folder


@dataclass(frozen=True)
class Served:
    """Model of a stage: its folder, its weights for a seed, its limits, its gateway, its engine.

    With `num_experts` it says which ones it chose, and finds prefixes in its cache.
    """

    make_folder: Callable[[Path], Path] = make_text_folder
    make_model: Callable[[Path, int, bool], Any] = make_text_model
    max_prompt_tokens: int = MAX_PROMPT_TOKENS
    max_tokens: int = MAX_TOKENS
    gateway: Mapping[str, object] = field(default_factory=dict)
    engine: str = "vllm"
    num_experts: int = 0
    records_sessions: bool = False

    @property
    def length(self) -> int:
        return self.max_prompt_tokens + self.max_tokens

    def make_engine(self, folder: Path) -> VllmEngine | SglangEngine:
        if self.engine == "vllm":
            more: dict[str, Any] = {"num_experts": self.num_experts, "caches_prefixes": self.num_experts > 0}
            return VllmEngine(VllmSettings(str(folder), "float32", self.length, 16, 64 << 20, **more))
        settings = SglangSettings(str(folder), "float32", self.length, 16, 64 << 20, serves_agents=True)
        return SglangEngine(settings, AutoTokenizer.from_pretrained(folder))


@dataclass
class Stage:
    """All parts. `models`: Hugging Face's model of every version, by number."""

    folder: Path
    served: Served
    replica: Replica
    receiver: HandFedReceiver
    gateway: Gateway
    learner: LearnerClient
    models: dict[int, Any]
    step: int = 0
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def url(self) -> str:
        return self.gateway.url

    def offer(self, seed: int, ends: bool = True) -> int:
        """Stage the weights of a new model, which the replica loads when it likes; return their number."""
        number = self.learner.register_version(self.step)
        self.models[number] = self.served.make_model(self.folder, seed, ends)
        version = PolicyVersion(number, self.step)
        self.receiver.staged.append(self.held.enter_context(stage(self.models[number], version)))
        return number

    def serve(self, seed: int, ends: bool = True) -> int:
        """Have the replica serve the weights of a new model."""
        number = self.offer(seed, ends)
        wait_for(lambda: self.replica.status().version == number, f"version {number}")
        return number

    def post(self, path: str, body: Any, key: str = "", **headers: str) -> httpx.Response:
        if key:
            headers["Authorization"] = f"Bearer {key}"
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=CALL_S)

    def open(self) -> Agent:
        """Open a session."""
        reply = self.post("/sessions", {"wait_s": 20})
        assert reply.status_code == 200, reply.text
        session = reply.json()
        client = openai.OpenAI(base_url=session["base_url"], api_key="unknown", max_retries=0, timeout=CALL_S)
        return Agent(self, session, client)

    def take_group(self) -> Group:
        """Return the oldest finished group, as a learner that trains one per step."""
        reservation = self.learner.reserve(self.step, 20.0)
        assert reservation is not None, "no group came"
        groups = self.learner.fetch([ticket.ticket for ticket in reservation.tickets])
        self.learner.trained(self.step)
        self.step += 1
        return groups[0]

    def counter(self, name: str) -> int:
        return int(self.gateway.manager.counters[name])


@dataclass
class Agent:
    """A session, and a client that knows its `base_url` alone."""

    stage: Stage
    session: dict[str, Any]
    client: openai.OpenAI

    @property
    def key(self) -> str:
        return str(self.session["key"])

    def chat(self, *messages: Any, max_tokens: int = 24, **more: Any) -> Any:
        """Return a chat's answer, with the log-probs and the ids that vLLM shows."""
        wanted = {"logprobs": True, "extra_body": {"return_token_ids": True}}
        return self.client.chat.completions.create(
            model="any", messages=list(messages), max_tokens=max_tokens, **{**wanted, **more}
        )

    def complete(self, prompt: Any, max_tokens: int = 24, **more: Any) -> Any:
        """Return a completion, as `chat`."""
        wanted = {"logprobs": 0, "extra_body": {"return_token_ids": True}}
        return self.client.completions.create(
            model="any", prompt=prompt, max_tokens=max_tokens, **{**wanted, **more}
        )

    def reward(self, reward: float = 1.0, **more: Any) -> httpx.Response:
        return self.stage.post("/reward", {"reward": reward, **more}, self.key)


@contextlib.contextmanager
def open_gateway_stage(
    folder: Path, deadline_s: float = 120.0, served: Served | None = None
) -> Iterator[Stage]:
    """A buffer, and a replica with an engine and a gateway that serves version 1."""
    served = served or Served()
    model_folder, data = served.make_folder(folder / "model"), folder / "train.jsonl"
    prompt = [{"role": "user", "content": QUESTION}]
    rows = [{"prompt": prompt, "ground_truth": str(row), "extra_info": {"row": row}} for row in range(50)]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    config = Config.model_validate(
        {
            "model": {"path": str(model_folder), "dtype": "float32"},
            "data": {"train": str(data), "max_prompt_tokens": served.max_prompt_tokens},
            "reward": {"fn": "exact_match"},
            "rollout": {
                "group_size": GROUP_SIZE,
                "max_tokens": served.max_tokens,
                "router_replay": "r3" if served.num_experts else "off",
                "resume_partial": served.records_sessions,
                "gateway": {"port": 0, "session_deadline_s": deadline_s, **served.gateway},
            },
            "learner": {"groups_per_step": 1, "minibatches": 1},
            "staleness": {"max_lag": 60, "ready_batches": 60},
            "buffer": {"journal": "none", "lease_s": 60.0},
            "algorithm": {"drop_constant_groups": False},
        }
    )
    buffer = composition.build(ServiceContext(config, "buffer.0", folder / "run", "test"))
    with running(buffer), contextlib.ExitStack() as held:
        wait_for(lambda: buffer.status().address, "the buffer's address")
        address, receiver, gateways = buffer.status().address, HandFedReceiver(), []
        prompts = load_prompts(data, build_tokenizer(), served.max_prompt_tokens)

        async def build() -> ReplicaParts:
            engine = served.make_engine(model_folder)
            metered = MeteredEngine(engine, SystemClock())
            context = ServiceContext(config, "rollout.0", folder / "run", "test")
            gateway = build_gateway(context, prompts, engine, metered)
            assert gateway is not None
            gateways.append(gateway)
            client = ReplicaClient(address, "rollout.0", 5.0)
            return ReplicaParts(metered, client, receiver, gateway.manager, None, prompts, gateway=gateway)

        settings = ReplicaSettings(4, 5.0, 10.0, records_turns=served.records_sessions)
        replica = Replica(ThreadRuntime(), "rollout.0", settings, build)
        learner = LearnerClient(address)
        with running(replica):
            _wait_for_engine(replica)
            found = Stage(model_folder, served, replica, receiver, gateways[0], learner, {}, held=held)
            learner.open("test")
            found.serve(1)
            yield found
        learner.close()


def _wait_for_engine(replica: Replica) -> None:
    """Wait up to some minutes: the machine may be busy."""
    for _ in range(15):
        with contextlib.suppress(AssertionError):
            wait_for(lambda: replica.status().state != "STARTING", "the engine")
            return
    raise AssertionError("the engine did not start")
