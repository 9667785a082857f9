"""stft of a sharded signal against plain torch: neighbours send each other a part of a frame."""

import pytest
import torch

from longmesh import Replicate, Shard, distribute_tensor
from longmesh.debug import explain
from longmesh.testing import cpu_mesh
from support.op_check import compare_op

WINDOW = torch.hann_window(8)


def spectra(mesh_shape):
    wrong = []
    for hop in (2, 5, 8):

        def stft(x, w, hop=hop):
            found = torch.stft(x, 8, hop, window=w, center=False, return_complex=True)
            return torch.view_as_real(found)

        wrong += compare_op(stft, [torch.randn(2, 41), WINDOW], mesh_shape, grad=False)
    return wrong


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2), (1,)])
def test_as_plain_torch(pool, mesh_shape):
    assert pool.run(spectra, mesh_shape, ranks=torch.Size(mesh_shape).numel(), timeout=120.0)[0] == []


def sent():
    x = distribute_tensor(torch.randn(2, 3000), cpu_mesh(3), [Shard(1)])
    w = distribute_tensor(WINDOW, x.device_mesh, [Replicate()])
    told = explain(lambda: torch.stft(x, 8, 4, window=w, center=False, return_complex=True))
    return sum(op.sent_bytes for op in told.ops), told.result.placements


def test_frames_stay_sharded(pool):
    results = pool.run(sent, ranks=3)
    assert {placements for _, placements in results} == {(Shard(2),)}
    assert (
        0 < sum(count for count, _ in results) <= 2 * 2 * 8 * 4
    )  # 8 samples of 2 rows over 2 borders, at the most
