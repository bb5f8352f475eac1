"""Methods that come through the door (`comm.door`), one in each file."""

from task_images.comm.shipped.diloco import DiLoCo
from task_images.comm.shipped.onebit_adam import OneBitAdam
from task_images.comm.shipped.slowmo import SlowMo

SHIPPED = (SlowMo, DiLoCo, OneBitAdam)
