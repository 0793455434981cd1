"""Simulates jax_ub's overlap schedules to predict a call's time on other hardware."""

from jax_ub._src.prediction.estimate import Prediction as Prediction
from jax_ub._src.prediction.estimate import estimate as estimate
from jax_ub._src.prediction.estimate import predict as predict
from jax_ub._src.prediction.hardware import HARDWARE as HARDWARE
from jax_ub._src.prediction.hardware import Hardware as Hardware
from jax_ub._src.prediction.hardware import host as host
from jax_ub._src.tools.simulate.models import MODELS as MODELS
