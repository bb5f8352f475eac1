"""VGG networks (Simonyan and Zisserman 2014, table 1: A, B, D, E), with or without normalization."""

from torch import Tensor, nn

from task_images.models.resnet import make_norm, widen

# Depth -> number of convolutions in each of the five stages, and these stages' channels.
VGGS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
CHANNELS = (64, 128, 256, 512, 512)
HIDDEN = 4096
GRID = 7
DROPOUT = 0.5


def vgg(depth: int, classes: int, width: float = 1.0, norm: str | None = None) -> nn.Module:
    """The VGG of `depth` in VGGS. Input of any size from 32x32, designed for 224x224: features are pooled to a 7x7
    grid.

    Initialization: convolutions Kaiming normal (fan out), linear layers normal with standard deviation 0.01, biases 0.
    """
    model = _Vgg(VGGS[depth], classes, width, norm)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.01)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


class _Vgg(nn.Module):
    def __init__(self, convolutions: tuple[int, ...], classes: int, width: float, norm: str | None) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        inputs = 3
        for number, channels in zip(convolutions, (widen(channels, width) for channels in CHANNELS), strict=True):
            stages.append(_stage(inputs, channels, number, norm))
            inputs = channels
        hidden = widen(HIDDEN, width)
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(GRID)
        self.classifier = nn.Sequential(
            *(nn.Linear(inputs * GRID * GRID, hidden), nn.ReLU(True), nn.Dropout(DROPOUT)),
            *(nn.Linear(hidden, hidden), nn.ReLU(True), nn.Dropout(DROPOUT)),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.pool(self.stages(images)).flatten(1))  # type: ignore[no-any-return]


def _stage(inputs: int, outputs: int, convolutions: int, norm: str | None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(convolutions):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
        if norm:
            layers.append(make_norm(norm)(outputs))
        layers.append(nn.ReLU(True))
        inputs = outputs
    return nn.Sequential(*layers, nn.MaxPool2d(2))
