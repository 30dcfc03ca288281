"""Live bytes are those of distinct storages, from their first tensor to their last."""

import torch

from fxpar.live_bytes import LiveBytes

ROW = 4 * 1000


def test_results_count_until_they_are_gone():
    x = torch.ones(1000)
    with LiveBytes(counted=[x], known=[]) as live:
        a = x + 1
        del a
        b = x * 2
        assert live.live == 2 * ROW and live.peak == 2 * ROW
        c = b + x
        assert live.peak == 3 * ROW
        del b, c
        assert live.live == ROW


def test_views_share_their_storage():
    with LiveBytes(counted=[], known=[]) as live:
        a = torch.zeros(1000)
        view = a.view(10, 100)[2:]
        assert live.live == ROW
        del a
        assert live.live == ROW
        del view
        assert live.live == 0 and live.peak == ROW


def test_known_tensors_and_their_views_never_count():
    batch = torch.ones(1000)
    with LiveBytes(counted=[], known=[batch]) as live:
        part = batch[:10]
        doubled = part * 2
        assert live.peak == 40 and doubled.numel() == 10
