"""Leases: at most one holder at a time, and never for longer than asked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rakv_cluster.cluster.leases import LeaseTable
from rakv_cluster.testing import ManualClock

KEYS = [bytes([n]) * 32 for n in range(3)]
keys = st.sampled_from(KEYS)
holders = st.sampled_from("abc")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), keys, holders, st.sampled_from([1.0, 5.0])),
        st.tuples(st.just("release"), keys, holders),
        st.tuples(st.just("fulfilled"), keys),
        st.tuples(st.just("advance"), st.sampled_from([0.5, 1.0, 3.0])),
    ),
    max_size=60,
)


@given(steps)
def test_a_key_has_one_holder_until_release_fulfilment_or_expiry(
    script: list[tuple[object, ...]],
) -> None:
    clock = ManualClock()
    table = LeaseTable(clock)
    model: dict[bytes, tuple[str, float]] = {}
    for step in script:
        now_s = clock.monotonic_s()
        model = {key: held for key, held in model.items() if held[1] > now_s}
        match step:
            case ("acquire", bytes(key), str(who), float(ttl_s)):
                lease = table.acquire([key], who, ttl_s)[key]
                if model.get(key, (who, 0.0))[0] == who:
                    model[key] = (who, now_s + ttl_s)
                assert lease.holder == model[key][0]
                assert lease.remaining_s == model[key][1] - now_s
            case ("release", bytes(key), str(who)):
                table.release([key], who)
                if model.get(key, ("", 0.0))[0] == who:
                    del model[key]
            case ("fulfilled", bytes(key)):
                table.fulfilled([key])
                model.pop(key, None)
            case ("advance", float(seconds)):
                clock.advance(seconds)


def test_a_full_table_grants_without_remembering() -> None:
    table = LeaseTable(ManualClock(), max_leases=2)
    granted = [table.acquire([key], who, 1.0)[key] for key, who in zip(KEYS, "abc", strict=True)]
    assert [lease.holder for lease in granted] == ["a", "b", "c"]
    assert table.acquire([KEYS[2]], "d", 1.0)[KEYS[2]].holder == "d"
    assert table.acquire([KEYS[0]], "d", 1.0)[KEYS[0]].holder == "a"
    assert len(table) == 2


def test_no_lease_outlives_the_tables_maximum() -> None:
    table = LeaseTable(ManualClock(), max_ttl_s=10.0)
    assert table.acquire([KEYS[0]], "a", 1e9)[KEYS[0]].remaining_s == 10.0
