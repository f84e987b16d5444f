"""The peak of allocator events."""

from shardwise.pytorch.peak import peak_of


def test_the_peak_is_that_of_the_running_sum():
    assert peak_of([]) == 0
    assert peak_of([(1, 100), (2, 50), (1, -100), (3, 70), (2, -50)]) == 150
    assert peak_of([(9, -100), (1, 80)]) == 0  # what was there before goes first


def test_an_address_that_is_given_out_again_was_released():
    unseen = [(1, 100), (1, 100), (1, 60), (1, -60), (2, 90)]
    assert peak_of(unseen) == 100
    assert peak_of([(1, 100), (2, 10), (1, 40), (3, 60)]) == 110
