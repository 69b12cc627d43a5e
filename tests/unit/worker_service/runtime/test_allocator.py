"""What the C library's allocator says of itself."""

import platform

import pytest
import torch

from worker_service.runtime.allocator import allocator_report

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc tells")


def test_what_is_taken_is_in_use_until_it_is_given_back() -> None:
    device = torch.device("cpu")
    before = allocator_report(device)
    tensor = torch.empty(40 << 20, dtype=torch.uint8)
    during = allocator_report(device)
    assert during.used_bytes - before.used_bytes >= tensor.nbytes
    assert during.reserved_bytes >= during.used_bytes
    del tensor
    assert allocator_report(None).used_bytes - before.used_bytes < 20 << 20
