"""Lets JAX see a GPU's device file, which it looks for before it asks the driver.

Python imports this module as it starts where its folder is in PYTHONPATH.
"""

import os.path

exists = os.path.exists
os.path.exists = lambda path: path == "/dev/nvidiactl" or exists(path)
