"""What can be stored, and what cannot."""

import pytest
import torch

from loader.store.folder import StoreFolder
from tests.support.restart_store import KEY, write


@pytest.mark.parametrize(
    "tensor", [torch.ones(4, 6).T, torch.ones(4, 6)[:, :3], torch.ones(3, 3).to_sparse(), torch.ones(2).cfloat()]
)
def test_only_plain_tensors_can_be_stored(folder: StoreFolder, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="is no plain tensor"):
        write(folder, KEY, {"w": tensor})
    assert folder.entries() == []


def test_a_parameter_can_be_stored(folder: StoreFolder) -> None:
    assert write(folder, KEY, {"w": torch.nn.Parameter(torch.ones(3))}) > 0
