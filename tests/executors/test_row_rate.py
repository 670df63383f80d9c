"""How fast an engine takes rows."""

from batchmill.executors.row_rate import MEASURE_S, RowRate


def test_a_rate_is_that_of_the_last_measured_time():
    """Rows that fill an engine at its start are no rate: nothing is known before MEASURE_S; old rows are forgotten."""
    rate = RowRate()
    rate.count(4096, 0.0)
    rate.count(4096, 0.0)
    assert rate.rows_in(1.0) == 0
    rate.count(1808, MEASURE_S)
    assert rate.rows_in(MEASURE_S) == 10_000
    rate.count(5, MEASURE_S * 1.5)
    rate.count(5, 3 * MEASURE_S)
    assert rate.rows_in(4 * MEASURE_S) == 20
