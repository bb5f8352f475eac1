"""Train a small convolutional network on MNIST."""

# mypy: disable-error-code="no-untyped-call, var-annotated"

import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from task_images.mnist.data import load

FOLDER = os.environ.get("MLBENCH_DATA_DIR") or "mnist"
BATCH, EPOCHS = 128, int(os.environ.get("EPOCHS", "10"))


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.drop = nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [n, 1, 28, 28] to log-probabilities [n, 10]."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.drop(self.conv2(x)), 2))
        x = F.dropout(F.relu(self.fc1(x.flatten(1))), training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def main() -> None:
    """Train and print the accuracy after each epoch."""
    torch.manual_seed(1234)
    training, validation = load(FOLDER, "training"), load(FOLDER, "validation")
    model = Net()
    loader = DataLoader(training, BATCH, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(1, EPOCHS + 1):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            F.nll_loss(model(images), labels).backward()
            optimizer.step()
        model.eval()
        with torch.inference_mode():
            hits = sum(
                int((model(images).argmax(1) == labels).sum()) for images, labels in DataLoader(validation, 1000)
            )
        accuracy = 100 * hits / len(validation)
        print(f"epoch {epoch}: {accuracy:.2f} % of the validation images", flush=True)


if __name__ == "__main__":
    main()
