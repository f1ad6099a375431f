"""The array types that cross the borders of the thinking wing."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
