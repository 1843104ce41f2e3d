"""Errors cross actors and become statuses; both must survive."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from rakv_cluster import errors
from rakv_cluster.errors import RakvError


def tree(root: type[RakvError]) -> Iterator[type[RakvError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


ALL = list(tree(RakvError))


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_survives_pickling(kind: type[RakvError]) -> None:
    error = kind("no", field="messages[0].content", retry_after_s=1.5)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  # what Ray does with a raised error
    assert type(copy) is kind
    assert (copy.message, copy.field, copy.retry_after_s) == ("no", "messages[0].content", 1.5)
    assert str(copy) == "no"


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_is_drawn_in_the_module_head(kind: type[RakvError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("kind", list(tree(errors.InvalidRequest)), ids=lambda k: k.__name__)
def test_client_errors_are_4xx_and_value_errors(kind: type[RakvError]) -> None:
    assert 400 <= kind.http_status < 500
    assert issubclass(kind, ValueError)
