"""A timeline in the Trace Event Format, which Perfetto and chrome://tracing read (pure).

Every service is a process, every lane a thread of it. Times are whole microseconds since the window's start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.cli.timeline.spans import Span, Timeline, clip, lay_out

ORDER = ("run", "learner", "publisher", "weight_sync", "buffer", "rollout", "receiver")
_MAIN_THREAD = 0


def chrome_trace(timelines: Sequence[Timeline], about: Mapping[str, object]) -> dict[str, object]:
    """Return the JSON object of a trace.

    Args:
        timelines: Of one window.
        about: Plain values that are kept along with it.
    """
    start_s = timelines[0].window.start_s
    pids = _number_services(timelines)
    events = [_meta(pid, _MAIN_THREAD, "process_name", name=service) for service, pid in pids.items()]
    events += [_meta(pid, _MAIN_THREAD, "process_sort_index", sort_index=pid) for pid in pids.values()]
    events += _spans(timelines, pids, start_s)
    for timeline in timelines:
        for moment in timeline.moments:
            base = {"pid": pids[moment.service], "tid": _MAIN_THREAD, "ts": _micros(moment.time_s - start_s)}
            events.append({**base, "ph": "i", "s": "p", "name": moment.name, "args": dict(moment.details)})
        for count in timeline.counts:
            base = {"pid": pids[count.service], "tid": _MAIN_THREAD, "ts": _micros(count.time_s - start_s)}
            events.append({**base, "ph": "C", "name": count.name, "args": {count.name: count.value}})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**about, "start_unix_s": start_s}}


def _spans(timelines: Sequence[Timeline], pids: Mapping[str, int], start_s: float) -> list[dict[str, object]]:
    events = []
    window = timelines[0].window
    laid = lay_out(span for timeline in timelines for span in clip(timeline.spans, window))
    next_tid = dict.fromkeys(pids, _MAIN_THREAD + 1)
    for (service, lane), rows in sorted(
        laid.items(), key=lambda item: (item[0][0], len(item[1]), item[0][1])
    ):
        for number, row in enumerate(rows):
            pid, tid = pids[service], next_tid[service]
            next_tid[service] += 1
            name = lane if len(rows) == 1 else f"{lane} {number}"
            events.append(_meta(pid, tid, "thread_name", name=name))
            events.append(_meta(pid, tid, "thread_sort_index", sort_index=tid))
            events += [_complete(span, pid, tid, start_s) for span in row]
    return events


def _complete(span: Span, pid: int, tid: int, start_s: float) -> dict[str, object]:
    ts = _micros(span.start_s - start_s)
    # Both ends are rounded, not the duration: spans that touch still do.
    dur = _micros(span.end_s - start_s) - ts
    args = {key: value for key, value in span.details.items() if value is not None}
    return {"ph": "X", "name": span.name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def _number_services(timelines: Sequence[Timeline]) -> dict[str, int]:
    found = {
        one.service
        for timeline in timelines
        for part in (timeline.spans, timeline.moments, timeline.counts)
        for one in part
    }
    return {service: pid for pid, service in enumerate(sorted(found, key=_rank), start=1)}


def _rank(service: str) -> tuple[int, int, str]:
    kind, _, index = service.partition(".")
    return (
        ORDER.index(kind) if kind in ORDER else len(ORDER),
        int(index) if index.isdigit() else 0,
        service,
    )


def _meta(pid: int, tid: int, kind: str, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
