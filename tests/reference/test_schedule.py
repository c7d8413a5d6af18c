"""Schedule: hand-checked lists, a brute-force twin, the note's counting sort, and the balance it buys."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flamia.reference import schedule

LENGTHS = st.lists(st.sampled_from([0, 1, 127, 128, 129, 255, 256, 257, 300, 1000]), max_size=6)


def boundaries(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def rows(found):
    columns = (found.document, found.head, found.tile, found.cost)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def visible_tiles(length, query_tiles, key_tiles, causal):
    """Count the 128 x 128 tiles that hold a visible (query, key) pair, from the definition of the mask."""
    count = 0
    for a in query_tiles:
        for b in key_tiles:
            last_query = min(128 * a + 127, length - 1)
            in_document = 128 * a < length and 128 * b < length
            count += in_document and (not causal or 128 * b <= last_query)
    return count


def brute_force(lengths, heads, causal, group=None):
    """The forward's list, or the backward's if ``group`` is given."""
    items = []
    for document, length in enumerate(lengths):
        every = range(-(-length // 128))
        for head in range(heads):
            for tile in every:
                if group is not None:
                    items.append((document, head, tile, group * visible_tiles(length, every, [tile], causal)))
                elif tile % 2 == 0:
                    items.append((document, head, tile, visible_tiles(length, [tile, tile + 1], every, causal)))

    def key(item):
        cost = item[3]
        if group == 1:
            cost = int("1" + "0" * (len(f"{cost:b}") - 1), 2)
        return -cost, *item[:3]

    return sorted(items, key=key)


def test_forward_by_hand():
    """Three documents of 3, 0 and 1 tiles, two heads: pairs (0, 1) and (2) of the first, (0) of the last."""
    found = schedule.forward_schedule([0, 300, 300, 400], 2, causal=True)
    assert rows(found) == [(0, 0, 0, 3), (0, 0, 2, 3), (0, 1, 0, 3), (0, 1, 2, 3), (2, 0, 0, 1), (2, 1, 0, 1)]
    found = schedule.forward_schedule([0, 300, 300, 400], 1, causal=False)
    assert rows(found) == [(0, 0, 0, 6), (0, 0, 2, 3), (2, 0, 0, 1)]


def test_backward_by_hand():
    found = schedule.backward_schedule([0, 300, 300, 400], 1, 4, causal=True)
    assert rows(found) == [(0, 0, 0, 12), (0, 0, 1, 8), (0, 0, 2, 4), (2, 0, 0, 4)]
    found = schedule.backward_schedule([0, 300, 300, 400], 1, 4, causal=False)
    assert rows(found) == [(0, 0, 0, 12), (0, 0, 1, 12), (0, 0, 2, 12), (2, 0, 0, 4)]


@given(LENGTHS, st.integers(1, 3), st.booleans())
def test_forward_equals_brute_force(lengths, heads, causal):
    found = schedule.forward_schedule(boundaries(lengths), heads, causal)
    assert rows(found) == brute_force(lengths, heads, causal)
    assert len(found) <= schedule.max_items(sum(lengths), len(lengths), heads, 256)


@given(LENGTHS, st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_backward_equals_brute_force(lengths, heads, group, causal):
    found = schedule.backward_schedule(boundaries(lengths), heads, group, causal)
    assert rows(found) == brute_force(lengths, heads, causal, group)
    assert len(found) <= schedule.max_items(sum(lengths), len(lengths), heads, 128)


@given(LENGTHS, st.integers(1, 3), st.booleans())
def test_both_passes_visit_the_same_tiles(lengths, heads, causal):
    forward = schedule.forward_schedule(boundaries(lengths), 2 * heads, causal)
    backward = schedule.backward_schedule(boundaries(lengths), heads, 2, causal)
    assert forward.cost.sum() == backward.cost.sum()


@given(LENGTHS, st.integers(1, 3), st.booleans())
def test_counting_sort_gives_the_same_places(lengths, heads, causal):
    """Integer counts alone, as on a GPU: items of larger cost, plus earlier items of equal cost."""
    found = rows(schedule.forward_schedule(boundaries(lengths), heads, causal))
    in_order = sorted(found)  # (document, head, tile)
    histogram = np.bincount([item[3] for item in in_order], minlength=1)
    next_place = np.cumsum(histogram[::-1])[::-1] - histogram
    placed = [None] * len(in_order)
    for item in in_order:
        placed[next_place[item[3]]] = item
        next_place[item[3]] += 1
    assert placed == found


def test_makespan_by_hand():
    assert schedule.makespan([5, 4, 3, 3, 3], 2) == schedule.Makespan(10, 9, 0.9)  # 5+3 / 4+3+3
    assert schedule.makespan([3, 3, 3, 4, 5], 2) == schedule.Makespan(11, 9, 18 / 22)  # in the order given
    assert schedule.makespan([7, 1], 4) == schedule.Makespan(7, 7, 8 / 28)
    assert schedule.makespan([], 4) == schedule.Makespan(0, 0, 1.0)
    assert schedule.makespan([0, 0], 4) == schedule.Makespan(0, 0, 1.0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 9))
def test_makespan_bounds(costs, sms):
    result = schedule.makespan(costs, sms)
    assert result.lower_bound <= result.makespan
    assert result.makespan * sms <= sum(costs) + (sms - 1) * max(costs)  # any list schedule
    assert result.balance * result.makespan * sms == pytest.approx(sum(costs) or result.makespan * sms)


def test_key_tiles_of_a_head_come_together():
    """17 tiles: costs of 16 and 17, then of 8 to 15."""
    found = schedule.backward_schedule([0, 17 * 128, 34 * 128], 2, 1, causal=True)
    runs = [(d, h, [0, 1]) for d in (0, 1) for h in (0, 1)] + [(0, 0, list(range(2, 10)))]
    assert rows(found)[:16] == [(d, h, t, 17 - t) for d, h, tiles in runs for t in tiles]


def test_longest_first_balances_a_long_document_among_short_ones():
    lengths = [32] * 1000 + [30_000]
    start = time.perf_counter()
    forward = schedule.forward_schedule(boundaries(lengths), 32, causal=True)
    backward = schedule.backward_schedule(boundaries(lengths), 8, 4, causal=True)
    for found in (forward, backward):
        assert schedule.makespan(found.cost, 148).balance > 0.98
        arrival = np.lexsort((found.tile, found.head, found.document))
        assert schedule.makespan(found.cost[arrival], 148).makespan > schedule.makespan(found.cost, 148).makespan
    assert time.perf_counter() - start < 2


def test_empty_documents_make_no_items_and_cost_nothing():
    start = time.perf_counter()
    cu = np.zeros(100_001, np.int64)
    assert len(schedule.forward_schedule(cu, 32, True)) == len(schedule.backward_schedule(cu, 8, 4, False)) == 0
    cu[-1] = 130
    assert rows(schedule.backward_schedule(cu, 1, 1, True)) == [(99_999, 0, 0, 2), (99_999, 0, 1, 1)]
    assert len(schedule.forward_schedule([0], 1, True)) == 0
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: schedule.forward_schedule([0, 5], 0, True),
            ValueError,
            "num_q_heads must be at least 1, got 0",
        ),
        (
            lambda: schedule.backward_schedule([0, 5], -1, 1, True),
            ValueError,
            "num_kv_heads must be .* got -1",
        ),
        (
            lambda: schedule.backward_schedule([0, 5], 1, 0, True),
            ValueError,
            "group must be at least 1, got 0",
        ),
        (lambda: schedule.forward_schedule([0, 5, 4], 1, True), ValueError, "cu_seqlens must not decrease"),
        (lambda: schedule.forward_schedule([0.0, 5.0], 1, True), TypeError, "cu_seqlens must hold integers"),
        (lambda: schedule.makespan([1], 0), ValueError, "num_sms must be at least 1, got 0"),
        (lambda: schedule.makespan([1, -2], 1), ValueError, "costs must not be negative, got -2"),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
