"""States that must not last."""

from asyncrl.control.vitals import DRAINING, SILENCE_LIMIT_S, SILENT, Overdue, Vitals


def watch(vitals: Vitals, *states: tuple[float, str]) -> list[Overdue]:
    found: list[Overdue] = []
    for now, state in states:
        found = vitals.overdue(now, {"rollout.0": {"state": state}})
    return found


def test_a_service_that_starts_for_longer_than_its_deadline_is_overdue() -> None:
    assert watch(Vitals(10.0), (0.0, "STARTING"), (9.0, "STARTING")) == []
    found = watch(Vitals(10.0), (0.0, "STARTING"), (10.5, "STARTING"))
    assert found == [Overdue("rollout.0", "STARTING", 10.0)]


def test_going_on_to_the_next_state_begins_its_time_anew() -> None:
    assert watch(Vitals(10.0), (0.0, "STARTING"), (9.0, "SYNCING"), (18.0, "SYNCING")) == []
    assert watch(Vitals(10.0), (0.0, "SYNCING"), (9.0, "READY"), (20.0, "SYNCING")) == []


def test_a_pulse_of_silence_does_not_stop_the_time_of_the_state_under_it() -> None:
    found = watch(Vitals(10.0), (0.0, "SYNCING"), (5.0, SILENT), (10.5, "SYNCING"))
    assert found == [Overdue("rollout.0", "SYNCING", 10.0)]


def test_a_drain_that_hangs_is_overdue() -> None:
    assert watch(Vitals(10.0), (0.0, DRAINING), (11.0, DRAINING))[0].state == DRAINING


def test_silence_has_a_limit_of_its_own() -> None:
    assert watch(Vitals(1000.0), (0.0, SILENT), (SILENCE_LIMIT_S, SILENT)) == []
    assert watch(Vitals(1000.0), (0.0, SILENT), (SILENCE_LIMIT_S + 1, SILENT))[0].state == SILENT
    assert watch(Vitals(1000.0), (0.0, SILENT), (50.0, "READY"), (70.0, SILENT)) == []


def test_a_service_that_is_no_longer_watched_is_forgotten() -> None:
    vitals = Vitals(10.0)
    vitals.overdue(0.0, {"rollout.0": {"state": "STARTING"}})
    vitals.overdue(5.0, {})
    assert vitals.overdue(11.0, {"rollout.0": {"state": "STARTING"}}) == []
