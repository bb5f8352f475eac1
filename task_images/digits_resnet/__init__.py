"""ResNet-20 on scikit-learn's handwritten digits: the official image classification in half a minute, on real data."""
