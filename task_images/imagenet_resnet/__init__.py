"""ResNet-50 on ImageNet, and its relatives. Read `task` first."""
