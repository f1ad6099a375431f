"""The array types of the control plane."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
