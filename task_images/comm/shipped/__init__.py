"""Methods that use the interface for custom methods (`comm.door`), one per file."""

from task_images.comm.shipped.diloco import DiLoCo
from task_images.comm.shipped.onebit_adam import OneBitAdam
from task_images.comm.shipped.slowmo import SlowMo

SHIPPED = (SlowMo, DiLoCo, OneBitAdam)
