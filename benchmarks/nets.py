"""The networks of the workloads as plain modules: of PyTorch alone, so that other tools train the
very same.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

FEATURES, CLASSES = 784, 10


class McMahanCNN(nn.Module):
    """The same network as `fd.CNN.mnist()`."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x.view(-1, 1, 28, 28)))


def softmax_regression() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 200), nn.ReLU(), nn.Linear(200, CLASSES))


def cifar_cnn() -> nn.Module:
    """The network of pfl-research's CIFAR10 benchmark, without its dropout: 1.6 million
    parameters.
    """
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "softmax regression": softmax_regression,
    "softmax 100": lambda: nn.Linear(100, CLASSES),
    "mlp": mlp,
    "mnist cnn": McMahanCNN,
    "cifar cnn": cifar_cnn,
}
