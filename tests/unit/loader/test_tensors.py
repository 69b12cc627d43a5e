from pathlib import Path

from loader.tensors import Piece, TensorInfo, files_of, rows_of


def stored(name: str, file: str, pieces: tuple[Piece, ...] = ()) -> TensorInfo:
    return TensorInfo(name, "F32", (2,), Path(file), 0, 8, name, pieces=pieces)


def test_the_files_of_tensors_are_those_of_all_their_pieces() -> None:
    parts = tuple(Piece(0, number, number + 1, stored("a", file)) for number, file in enumerate("zyx"))
    assert files_of([stored("a", "z", parts), stored("b", "b"), stored("c", "b")]) == [Path(name) for name in "bxyz"]


def test_rows_of_a_tensor_lie_where_they_are_stored() -> None:
    whole = TensorInfo("w", "BF16", (6, 4), Path("x"), 100, 48, "stored.w", rotary_heads=2)
    assert rows_of(whole, "k", 2, 5) == TensorInfo("k", "BF16", (3, 4), Path("x"), 116, 24, "stored.w", rotary_heads=2)
