"""ResNet version 2 for small images in TensorFlow (He et al. 2016), as the original's TensorFlow task has it.

No norm after the stem, norm and ReLU before every convolution and at the end, and a 1x1 convolution of the activated
input, without a norm, in the first block of every stage. ResNet-20 has 272 538 parameters. The same as version 2 of
models.resnet; images are [n, height, width, channels].
"""

import math
from typing import Any

import numpy as np
import tensorflow as tf

from task_images.seeds import numpy_generator

WIDTHS = (16, 32, 64)
EPSILON = 1e-5
MOMENTUM = 0.1  # of the running statistics: what a batch adds


class ResNet(tf.Module):  # type: ignore[misc]
    """A ResNet of `depth` 6n+2. Raises ValueError for another depth. Equal seeds give equal parameters.

    weights   parameters of convolutions and of the classifier; norms: those of the norms
    averages  running means and variances
    """

    def __init__(self, depth: int, seed: int, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"a ResNet for small images has depth 6n+2, not {depth}")
        self._stream = numpy_generator(seed, "model")
        self.weights: list[Any] = []
        self.norms: list[Any] = []
        self.averages: list[Any] = []
        self._stem = self._convolution(3, channels, WIDTHS[0])
        self._blocks = []
        inputs = WIDTHS[0]
        for stage, outputs in enumerate(WIDTHS):
            for index in range((depth - 2) // 6):
                self._blocks.append(_Block(self, inputs, outputs, 2 if stage and not index else 1, first=not index))
                inputs = outputs
        self._last = _Norm(self, inputs)
        bound = 1 / math.sqrt(inputs)
        self._kernel = self._weight(self._stream.uniform(-bound, bound, (inputs, classes)))
        self._bias = self._weight(self._stream.uniform(-bound, bound, classes))

    @property
    def parameters(self) -> list[Any]:
        """All trainable variables."""
        return [*self.weights, *self.norms]

    @property
    def count(self) -> int:
        """Number of parameters."""
        return sum(int(tf.size(item)) for item in self.parameters)

    def __call__(self, images: Any, training: bool) -> Any:
        """Logits [n, classes] of images [n, height, width, channels]. In training the running statistics move."""
        x = _convolve(images, self._stem, 1)
        for block in self._blocks:
            x = block(x, training)
        x = tf.reduce_mean(tf.nn.relu(self._last(x, training)), [1, 2])
        return tf.linalg.matmul(x, self._kernel) + self._bias

    def _convolution(self, side: int, inputs: int, outputs: int) -> Any:
        """Kaiming normal, fan out."""
        deviation = math.sqrt(2 / (side * side * outputs))
        return self._weight(deviation * self._stream.standard_normal((side, side, inputs, outputs)))

    def _weight(self, values: Any) -> Any:
        self.weights.append(tf.Variable(values.astype(np.float32)))
        return self.weights[-1]


class _Block(tf.Module):  # type: ignore[misc]
    def __init__(self, model: ResNet, inputs: int, outputs: int, stride: int, *, first: bool) -> None:
        super().__init__()
        self._stride = stride
        self._norm1 = _Norm(model, inputs)
        self._convolution1 = model._convolution(3, inputs, outputs)
        self._norm2 = _Norm(model, outputs)
        self._convolution2 = model._convolution(3, outputs, outputs)
        self._projection = model._convolution(1, inputs, outputs) if first else None

    def __call__(self, x: Any, training: bool) -> Any:
        activated = tf.nn.relu(self._norm1(x, training))
        shortcut = x if self._projection is None else _convolve(activated, self._projection, self._stride)
        y = _convolve(activated, self._convolution1, self._stride)
        return _convolve(tf.nn.relu(self._norm2(y, training)), self._convolution2, 1) + shortcut


class _Norm(tf.Module):  # type: ignore[misc]
    """Normalization over the batch."""

    def __init__(self, model: ResNet, width: int) -> None:
        super().__init__()
        self._scale, self._offset = tf.Variable(tf.ones(width)), tf.Variable(tf.zeros(width))
        model.norms += [self._scale, self._offset]
        self._mean = tf.Variable(tf.zeros(width), trainable=False)
        self._variance = tf.Variable(tf.ones(width), trainable=False)
        model.averages += [self._mean, self._variance]

    def __call__(self, x: Any, training: bool) -> Any:
        batch_norm = tf.compat.v1.nn.fused_batch_norm
        if not training:
            kept = {"mean": self._mean, "variance": self._variance}
            return batch_norm(x, self._scale, self._offset, **kept, epsilon=EPSILON, is_training=False)[0]
        y, mean, variance = batch_norm(x, self._scale, self._offset, epsilon=EPSILON, is_training=True)
        self._mean.assign_add(MOMENTUM * (mean - self._mean))
        self._variance.assign_add(MOMENTUM * (variance - self._variance))
        return y


def _convolve(x: Any, kernel: Any, stride: int) -> Any:
    """Padded by one pixel on every side for a 3x3 kernel, as torch does; "SAME" would pad a stride of 2 to one side."""
    pad = int(kernel.shape[0]) // 2
    return tf.nn.conv2d(x, kernel, stride, [[0, 0], [pad, pad], [pad, pad], [0, 0]])
