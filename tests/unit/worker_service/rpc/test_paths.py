from pathlib import Path

import pytest

from stepwire.rpc.errors import StepwireError
from worker_service.rpc.paths import ModelRoots


@pytest.mark.parametrize("roots", [[], ["/models"]])
@pytest.mark.parametrize("url", ["http://host/m", "hf://org/name", "s3://bucket/m", "file:///models/m"])
def test_a_worker_brings_no_model_from_elsewhere(roots: list[str], url: str) -> None:
    with pytest.raises(StepwireError, match="a URL is no path of this machine; name it to the scheduler") as caught:
        ModelRoots(roots).resolve(url)
    assert (caught.value.reason, caught.value.metadata["field"]) == ("FIELD_INVALID", "model_path")


def test_a_path_below_a_root_is_resolved(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "m")
    assert ModelRoots([str(tmp_path)]).resolve(str(tmp_path / "link")) == (tmp_path / "m").resolve()
