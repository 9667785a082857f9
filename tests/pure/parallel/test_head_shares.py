"""Who computes which heads, and which features change hands for it."""

import pytest

from longmesh.errors import LongmeshError
from longmesh.parallel.feature_exchange import FeatureExchange, chunks
from longmesh.parallel.head_shares import scale, share_heads

SIZES = [(h, k, n) for k in (1, 2, 3, 5) for h in (k, 2 * k, 3 * k) for n in (1, 2, 3, 4, 7, 8)]


@pytest.mark.parametrize(("heads", "keys", "ranks"), SIZES)
def test_every_head_is_owned_once_and_finds_its_key_head(heads, keys, ranks):
    shares = share_heads(heads, keys, ranks)
    owned = [h for start, length in shares.owned for h in range(start, start + length)]
    assert sorted(owned) == list(range(heads))
    for rank, ((start, length), (key, count)) in enumerate(zip(shares.heads, shares.key_heads, strict=True)):
        assert length and length == count * shares.groups(rank)
        for i, head in enumerate(range(start, start + length)):
            assert key + i // shares.groups(rank) == head // (heads // keys)
        assert shares.owned[rank][1] in (0, length) and shares.owned[rank][0] == start


def test_key_heads_are_replicated_only_as_far_as_needed():
    assert share_heads(8, 2, 8).key_heads == ((0, 1),) * 4 + ((1, 1),) * 4
    assert share_heads(6, 6, 4).heads == ((0, 2), (2, 2), (4, 1), (5, 1))


def test_heads_that_share_keys_unequally_are_refused():
    with pytest.raises(LongmeshError, match="5 heads with 2 key heads"):
        share_heads(5, 2, 2)


def test_an_exchange_says_what_travels():
    shares = share_heads(6, 6, 4)
    exchange = FeatureExchange(chunks(24, 4), tuple((part,) for part in scale(shares.heads, 4)))
    assert not exchange.is_identity
    assert [exchange.bytes_sent(rank, 10, 4) for rank in range(4)] == [0, 80, 160, 80]
    assert "0:6          0:8" in exchange.explain()
    assert FeatureExchange(chunks(24, 3), tuple((part,) for part in chunks(24, 3))).is_identity
