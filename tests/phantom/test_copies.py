"""Values that are copied, not computed, come back."""

from __future__ import annotations

from child import Child


def test_small_values_come_back_as_they_were_sent(child: Child) -> None:
    """What a script sends to the device, or fills byte by byte, is what it reads there."""

    def body():
        import torch

        x = torch.arange(1000)
        y = x.cuda()
        return {
            "item": torch.tensor(3, device="cuda").item(),
            "same": torch.equal(y.cpu(), x),
            "view": y[10:20].cpu().tolist(),
            "clone": torch.equal(y.clone().cpu(), x),
            "strided": torch.arange(16).reshape(4, 4).cuda()[1].cpu().tolist(),
            "float": torch.tensor([1.5, -2.5]).cuda().tolist(),
            "bool": torch.tensor([True, False]).cuda().tolist(),
        }

    assert child(body) == {
        "item": 3,
        "same": True,
        "view": list(range(10, 20)),
        "clone": True,
        "strided": [4, 5, 6, 7],
        "float": [1.5, -2.5],
        "bool": [True, False],
    }
