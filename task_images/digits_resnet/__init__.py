"""ResNet-20 on handwritten digits. Read `task` first."""
