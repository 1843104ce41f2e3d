"""Predicted holders are those of a plain dictionary, whatever is added, renamed and forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.routing.predictions import Predictions

KEYS, REPLICAS = 8, 20
SLOTS = 16
Model = dict[bytes, dict[int, tuple[int, float]]]  # by slot: replica, until

adds = st.tuples(
    st.lists(st.integers(0, KEYS - 1), max_size=KEYS, unique=True), st.integers(0, REPLICAS - 1)
)
orders = st.permutations(range(-1, REPLICAS))


def key(number: int) -> bytes:
    return bytes([number])


def check(predictions: Predictions, model: Model, now_s: float) -> None:
    asked = [key(number) for number in range(KEYS)]
    chunks, replicas = predictions.holders(asked, now_s)
    found = {(asked[chunk], int(replica)) for chunk, replica in zip(chunks, replicas, strict=True)}
    believed = {
        (name, replica)
        for name, until in model.items()
        for replica, until_s in until.values()
        if until_s > now_s
    }
    assert found == believed
    assert len(found) == len(chunks)
    assert len(predictions) == len(model)


def moved(of: dict[int, tuple[int, float]], sources: list[int]) -> dict[int, tuple[int, float]]:
    oldest_first = sorted(of.values(), key=lambda entry: entry[1])
    known = [(sources.index(old), until_s) for old, until_s in oldest_first if old in sources]
    return {replica % SLOTS: (replica, until_s) for replica, until_s in known}


@given(st.lists(st.one_of(adds, orders), max_size=60), st.integers(1, KEYS), st.floats(0, 60))
def test_as_a_dictionary(steps: list[object], max_keys: int, now_s: float) -> None:
    predictions, model = Predictions(max_keys), Model()
    for until_s, step in enumerate(steps, start=1):
        if isinstance(step, tuple):
            numbers, replica = step
            predictions.add([key(number) for number in numbers], replica, float(until_s))
            for number in numbers:
                of = model.pop(key(number), {})
                model[key(number)] = of | {replica % SLOTS: (replica, float(until_s))}
                if len(model) > max_keys:
                    model.pop(next(iter(model)))
        else:
            assert isinstance(step, list)
            predictions = predictions.arranged(step)
            model = {name: moved(of, step) for name, of in model.items()}
    check(predictions, model, now_s)
