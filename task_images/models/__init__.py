"""The image models; `resnet` also has what they share: normalization, and channels in multiples of eight."""
