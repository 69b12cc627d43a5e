from pathlib import Path

from loader.tensors import Piece, TensorInfo, files_of


def stored(name: str, file: str, pieces: tuple[Piece, ...] = ()) -> TensorInfo:
    return TensorInfo(name, "F32", (2,), Path(file), 0, 8, name, pieces=pieces)


def test_the_files_of_tensors_are_those_of_all_their_pieces() -> None:
    parts = tuple(Piece(0, number, number + 1, stored("a", file)) for number, file in enumerate("zyx"))
    assert files_of([stored("a", "z", parts), stored("b", "b"), stored("c", "b")]) == [Path(name) for name in "bxyz"]
