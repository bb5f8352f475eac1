"""The Pareto front of plans and results."""

from mlbench_cli.util.front import find_front


def test_the_front_is_what_nothing_else_beats_in_both() -> None:
    offers = [(5.0, 1.0), (1.0, 9.0), (2.0, 5.0), (3.0, 6.0), (4.0, 5.0)]
    beaten = {a for a in offers for b in offers if b != a and b[0] <= a[0] and b[1] <= a[1]}
    assert find_front(offers, lambda offer: offer) == [offer for offer in sorted(offers) if offer not in beaten]
