"""Weight decay by kind of parameter."""

from torch import nn

ParameterGroup = dict[str, object]  # "params" and options of an optimizer


def split_decay(model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
    """Parameter groups: weights of convolutions and linear layers with decay; normalization parameters and biases
    without."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [item for item in parameters if item.dim() > 1], "weight_decay": weight_decay},
        {"params": [item for item in parameters if item.dim() <= 1], "weight_decay": 0.0},
    ]
