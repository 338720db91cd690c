"""Give tests and faults the same process on every machine: no GPU, and Ctrl-C is a KeyboardInterrupt.

Import before torch.
"""

import os
import signal

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
# A shell's background job ignores SIGINT, and so would every process that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
