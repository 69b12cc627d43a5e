"""The keys of the prefix cache: canonical, so that another process in another language finds the same."""

import hashlib
import struct

import pytest

from scheduler_service.core.prefix import KeyChain, root_key


def chain(*, block_size: int = 4, adapter: str = "", salt: str = "") -> KeyChain:
    return KeyChain(block_size=block_size, adapter=adapter, salt=salt)


def first_key(**fields: object) -> bytes:
    return chain(**fields).keys([1, 2, 3, 4, 5, 6, 7, 8], 1)[0]  # type: ignore[arg-type]


def test_the_root_is_this_digest() -> None:
    root = root_key(block_size=16, adapter="", salt="")
    assert root.hex() == "6a5cd7b6c46f5e98a32ab2951b995e33104cc43cf38185927bb2d55d57b11799"


def test_the_keys_of_known_ids_are_these_digests() -> None:
    keys = chain().keys([1, 2, 3, 4, 5, 6, 7, 8], 2)
    assert [key.hex() for key in keys] == [
        "c15e7e08c43ff4c28765deb400865076421fb31b82fc781f048c19aaf58e29dd",
        "48db012fdfbb20d1eeb5c5a6fc0f280c490894fc17d436bcefd406f8fb35b401",
    ]


def test_the_root_encodes_every_field_with_its_length() -> None:
    data = (
        b"stepwire-prefix-1" + struct.pack("<i", 4) + struct.pack("<q", 2) + b"ad" + struct.pack("<q", 3) + b"\xc3\xa9s"
    )
    assert root_key(block_size=4, adapter="ad", salt="és") == hashlib.sha256(data).digest()


def test_a_key_is_its_parents_digest_with_its_own_ids() -> None:
    keys = chain(block_size=2).keys([258, -1, 3, 70000], 2)
    root = root_key(block_size=2, adapter="", salt="")
    assert keys[0] == hashlib.sha256(root + bytes.fromhex("02010000ffffffff")).digest()
    assert keys[1] == hashlib.sha256(keys[0] + bytes.fromhex("0300000070110100")).digest()


@pytest.mark.parametrize("other", [{"adapter": "a"}, {"salt": "a"}, {"block_size": 2}])
def test_block_size_adapter_and_salt_change_every_key(other: dict[str, object]) -> None:
    assert first_key(**other) != first_key()


def test_block_size_changes_the_root_itself() -> None:
    assert root_key(block_size=4, adapter="", salt="") != root_key(block_size=2, adapter="", salt="")


def test_adapter_and_salt_cannot_be_mistaken_for_each_other() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("a\0b", "c"), ("a", "b\0c")]
    assert len({first_key(adapter=adapter, salt=salt) for adapter, salt in pairs}) == len(pairs)


def test_any_text_can_be_a_salt() -> None:
    lone = "\ud800"
    assert first_key(salt=lone) != first_key(salt="\ufffd")


def test_an_earlier_token_changes_all_later_keys() -> None:
    one, other = chain().keys([1, 2, 3, 4, 5, 6, 7, 8], 2), chain().keys([9, 2, 3, 4, 5, 6, 7, 8], 2)
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_a_later_token_changes_no_earlier_key() -> None:
    one, other = chain().keys([1, 2, 3, 4, 5, 6, 7, 8], 2), chain().keys([1, 2, 3, 4, 5, 6, 7, 9], 2)
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_the_order_of_tokens_matters() -> None:
    assert chain().keys([1, 2, 3, 4], 1) != chain().keys([1, 2, 4, 3], 1)


def test_a_chain_that_grows_equals_one_computed_at_once() -> None:
    ids = list(range(16))
    grown = chain()
    for num in (1, 1, 3, 4):
        keys = grown.keys(ids, num)
        assert keys == chain().keys(ids, num)


def test_fewer_keys_than_are_known_can_be_had() -> None:
    whole = chain()
    keys = list(whole.keys(list(range(12)), 3))
    assert whole.keys(list(range(12)), 1) == keys[:1]
    assert whole.keys(list(range(12)), 0) == []
    assert whole.keys(list(range(12)), 3) == keys
