"""The exception tree."""

import pickle

import pytest

from asyncrl.core import errors


@pytest.mark.parametrize("cls", errors.BY_NAME.values(), ids=lambda cls: cls.__name__)
def test_every_error_survives_a_process_boundary_with_its_hint(cls: type[errors.AsyncrlError]) -> None:
    found = pickle.loads(pickle.dumps(cls("what happened", hint="What to do")))
    assert type(found) is cls
    assert str(found) == "what happened. What to do"


def test_each_error_is_also_the_standard_type_that_it_stands_for() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    assert issubclass(errors.FencedError, PermissionError)
