"""The form of what the page shows, which its script reads as JSON and the terminal as it is (pure).

Texts are finished, in the page's words. A tone says how a thing looks: good, bad, warn, or busy.
"""

from __future__ import annotations

from typing import TypedDict

from asyncrl.page.pipeline import Edge, Node


class Pace(TypedDict):
    """Bottleneck of the run: its box, a title, the reason, and the service that the learner waits for."""

    node: str
    title: str
    why: str
    wait: str


class Obstacle(TypedDict):
    """Obstacle to the run's next step."""

    node: str
    service: str
    text: str
    count: str
    since: float
    tone: str


class Part(TypedDict):
    """A part of the right side of a law."""

    name: str
    count: str
    share: float
    kind: str


class Law(TypedDict):
    """A law of the account."""

    name: str
    total: str
    parts: list[Part]


class Account(TypedDict):
    """Both laws, and what does not add up."""

    residue: str
    tone: str
    laws: list[Law]


class Bar(TypedDict):
    """The share of tokens at one lag."""

    lag: str
    share: float
    text: str


class Lag(TypedDict):
    """The histogram of the newest step."""

    max_lag: int
    mean: str
    max: str
    masked: str
    bars: list[Bar]


class Service(TypedDict):
    """A service: `behind` says how far its version is behind the newest."""

    name: str
    is_replica: bool
    state: str
    tone: str
    version: str
    behind: str
    heartbeat: str
    restarts: str
    gateway: str


class Group(TypedDict):
    """How many services are alike."""

    name: str
    count: str
    tone: str


class Grouping(TypedDict):
    """Services of one kind by what they are alike in, the worst first."""

    title: str
    groups: list[Group]


class Event(TypedDict):
    """Event at a time, in seconds of the wall clock."""

    time: float
    kind: str
    service: str
    text: str
    tone: str


class View(TypedDict):
    """All of the page but curves and rollouts; `num_hidden`: services that are in groups only."""

    run: str
    state: str
    tone: str
    health: str
    is_leaving: bool
    phase: str
    error: str
    step: str
    steps: str
    progress: float | None
    accuracy: str
    time_left: str
    resumed: str
    place: str
    paused: bool
    bottleneck: Pace
    obstacles: list[Obstacle]
    nodes: list[Node]
    edges: list[Edge]
    account: Account
    lag: Lag
    services: list[Service]
    groupings: list[Grouping]
    num_hidden: int
    events: list[Event]
