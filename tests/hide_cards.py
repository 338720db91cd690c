"""Hide every GPU from the tests and their processes, so that they do the same on every machine. Import before torch."""

import os

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
