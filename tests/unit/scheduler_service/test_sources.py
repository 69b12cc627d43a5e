"""What a call may name that is on another machine."""

import pytest

from scheduler_service.rpc.admin.roots import Roots
from scheduler_service.sources import check_source, is_elsewhere
from stepwire.rpc.errors import StepwireError


def test_a_hub_id_is_no_folder_and_a_url_is_what_it_is() -> None:
    assert check_source("org/name@v2") == "hf://org/name@v2"
    assert check_source("s3://bucket/m") == "s3://bucket/m"
    assert [is_elsewhere(name) for name in ("/m", "org/name", "https://h/m", "")] == [False, True, True, False]


@pytest.mark.parametrize(
    ("roots", "host"), [(("/models",), "127.0.0.1"), ((), "0.0.0.0")], ids=["some folders alone", "exposed"]
)
def test_nothing_from_elsewhere_is_loaded_where_not_everything_may_be(roots: tuple[str, ...], host: str) -> None:
    Roots("model_roots", (), "127.0.0.1").check_unbounded("org/name")
    with pytest.raises(
        StepwireError, match="org/name, which is no path, is not below the scheduler's model roots"
    ) as caught:
        Roots("model_roots", roots, host).check_unbounded("org/name")
    assert caught.value.metadata["field"] == "path"
