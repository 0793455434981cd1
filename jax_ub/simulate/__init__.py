"""The simulator of schedules: how long a call takes on a machine that is not here."""

from jax_ub.simulate.hardware import HARDWARE as HARDWARE
from jax_ub.simulate.hardware import Hardware as Hardware
from jax_ub.simulate.hardware import host as host
from jax_ub.simulate.models import MODELS as MODELS
from jax_ub.simulate.predict import Prediction as Prediction
from jax_ub.simulate.predict import estimate as estimate
from jax_ub.simulate.predict import predict as predict
