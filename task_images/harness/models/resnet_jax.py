"""`resnet.resnet` of version 1 with BatchNorm in JAX, on the same names of parameters and the same layout of images."""

from functools import partial
from typing import Any

from torch import Tensor

from task_images.harness.jax_training import Arrays, JaxProgram

EPSILON, MOMENTUM = 1e-5, 0.1


def make_resnet(jax: Any) -> JaxProgram:
    """The program of a ResNet's parameters, whatever its depth. The loss is the mean cross-entropy of a batch."""
    jnp = jax.numpy

    def evaluate(parameters: Arrays, buffers: Arrays, images: Any) -> Any:
        return _Pass(jax, parameters, buffers, training=False)(images)

    def train(parameters: Arrays, buffers: Arrays, images: Any, labels: Any) -> Any:
        run = _Pass(jax, parameters, buffers, training=True)
        outputs = run(images)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(outputs), labels[:, None], axis=1)
        return -chosen.mean(), (outputs, run.buffers)

    return JaxProgram(evaluate, train, _unpack)


def _unpack(data: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, ...], float, float]:
    return data, 1.0, float(len(data[1]))


class _Pass:
    """One forward pass; `buffers` are the running statistics after it."""

    def __init__(self, jax: Any, parameters: Arrays, buffers: Arrays, *, training: bool) -> None:
        self._jax, self._parameters, self.buffers, self._training = jax, parameters, dict(buffers), training

    def __call__(self, images: Any) -> Any:
        """Logits [n, classes] of images [n, channels, height, width]."""
        relu, parameters = self._jax.nn.relu, self._parameters
        x = relu(self._norm("stem.1", self._convolve("stem.0", images, 1)))
        blocks = sum(name.startswith("stages.") and name.endswith(".convolution1.weight") for name in parameters)
        for name in (f"stages.{index}" for index in range(blocks)):
            widens = f"{name}.shortcut.0.weight" in parameters
            y = relu(self._norm(f"{name}.norm1", self._convolve(f"{name}.convolution1", x, 2 if widens else 1)))
            y = self._norm(f"{name}.norm2", self._convolve(f"{name}.convolution2", y, 1))
            if widens:
                x = self._norm(f"{name}.shortcut.1", self._convolve(f"{name}.shortcut.0", x, 2))
            x = relu(x + y)
        return x.mean((2, 3)) @ parameters["classifier.weight"].T + parameters["classifier.bias"]

    def _convolve(self, name: str, x: Any, stride: int) -> Any:
        kernel = self._parameters[f"{name}.weight"]
        around = [(kernel.shape[-1] // 2,) * 2] * 2
        convolve = partial(self._jax.lax.conv_general_dilated, dimension_numbers=("NCHW", "OIHW", "NCHW"))
        return convolve(x, kernel, (stride, stride), around)

    def _norm(self, name: str, x: Any) -> Any:
        mean, variance = self.buffers[f"{name}.running_mean"], self.buffers[f"{name}.running_var"]
        if self._training:
            count = x.size // x.shape[1]
            found, spread = x.mean((0, 2, 3)), x.var((0, 2, 3))
            self.buffers[f"{name}.running_mean"] = (1 - MOMENTUM) * mean + MOMENTUM * found
            self.buffers[f"{name}.running_var"] = (1 - MOMENTUM) * variance + MOMENTUM * spread * count / (count - 1)
            mean, variance = found, spread
        scale = self._parameters[f"{name}.weight"] / self._jax.numpy.sqrt(variance + EPSILON)
        shift = self._parameters[f"{name}.bias"] - mean * scale
        return x * scale[:, None, None] + shift[:, None, None]
