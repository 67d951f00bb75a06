"""Tensors in huge pages: zeros, aligned, and apart from each other."""

from __future__ import annotations

import pytest
import torch

from ballast_engine.build import free_memory
from ballast_engine.memory import HugePages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_zeros_that_share_no_memory(dtype):
    memory = HugePages()
    found = [memory.zeros(shape, dtype) for shape in ((3, 5), (7,), (40, 1024, 1024), (2, 2))]
    for number, tensor in enumerate(found, start=1):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.view(-1)[:1000].any()
        tensor.view(-1)[:1000].fill_(number)
        tensor.view(-1)[-1] = number

    assert [float(tensor.view(-1)[0]) for tensor in found] == [1, 2, 3, 4]
    assert [float(tensor.view(-1)[-1]) for tensor in found] == [1, 2, 3, 4]


def test_cached_pages_of_files_are_free_memory_of_a_control_group(tmp_path):
    (tmp_path / "memory.max").write_text(f"{1000 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{950 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon {600 << 20}\ninactive_file {300 << 20}\nactive_file 7\n")

    assert free_memory(tmp_path) == 350 << 20


def test_a_tensor_outlives_the_allocator():
    tensor = HugePages().zeros((1024, 1024), torch.float32)
    tensor.fill_(1.0)

    assert float(tensor.sum()) == 1024 * 1024
