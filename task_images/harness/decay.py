"""Which parameters decay."""

from torch import nn

ParameterGroup = dict[str, object]  # of an optimizer: "params" and options


def split_decay(model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
    """Parameter groups: weights of convolutions and linear layers with decay; scales, shifts and biases without."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [item for item in parameters if item.dim() > 1], "weight_decay": weight_decay},
        {"params": [item for item in parameters if item.dim() <= 1], "weight_decay": 0.0},
    ]
