"""Every transport between actors on GPUs: weights arrive unchanged, and nothing leaks.

The two actors share one GPU: each of them reserves half of it. `nccl` needs two GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
import torch
from weight_lines import Line

from grpo_trainable.config.transport_catalog import TRANSPORTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
ALL = ("shm", "object_store", "cuda_ipc", "nixl", "nccl")


@pytest.fixture(scope="module", autouse=True)
def ray_session() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize("name", ALL)
def test_weights_of_a_gpu_arrive_on_a_gpu_whole_and_leave_nothing(name: str) -> None:
    """200 syncs run while the learner's weights keep changing.

    In each sync, the checksum that the generator computes on its device equals the one that the
    learner computed on its own device.
    """
    missing = TRANSPORTS[name].missing_on_machine()
    if missing is not None:
        pytest.skip(missing)
    line = Line(name, gpus=1 if name == "nccl" else 0.5)
    try:
        for round_ in range(50):
            assert line.sync(round_)
        before = line.held()
        for round_ in range(50, 250):
            assert line.sync(round_)
        for now, then in zip(line.held(), before, strict=True):
            assert now[0] <= then[0] + 2
            assert now[2] <= 1.02 * then[2] + 2
        if not line.transport.two_sided:
            line.generator.kill()
            line.replace_generator()  # the new generator has received no weights yet
            assert line.sync(250)
    finally:
        for actor in line.actors:
            actor.kill()


def test_a_gpu_changes_no_bit_of_what_travels() -> None:
    """Weights have the same checksum on the CPU and on the GPU, even if a copy computes it."""
    from grpo_trainable.protocol.checksums import PIECE_BYTES, copy_with_checksum, storage_checksum

    tensors = {
        "by_row": torch.randn(250, 400),
        "by_column": torch.randn(200, 300).t(),
        "short": torch.randn(5000).to(torch.bfloat16),
        "several_pieces": torch.randn(PIECE_BYTES),
    }
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    whole = storage_checksum(tensors)
    assert storage_checksum(on_gpu) == whole
    for device in ("cpu", "cuda"):
        copies = {name: torch.empty_like(t, device=device) for name, t in on_gpu.items()}
        assert copy_with_checksum(on_gpu, copies) == whole
        assert all(torch.equal(copies[name].cpu(), t) for name, t in tensors.items())
