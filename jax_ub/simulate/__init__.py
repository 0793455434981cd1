"""Simulates jax_ub's overlap schedules to predict a call's time on other hardware."""

from jax_ub.simulate.hardware import HARDWARE as HARDWARE
from jax_ub.simulate.hardware import Hardware as Hardware
from jax_ub.simulate.hardware import host as host
from jax_ub.simulate.models import MODELS as MODELS
from jax_ub.simulate.predict import Prediction as Prediction
from jax_ub.simulate.predict import estimate as estimate
from jax_ub.simulate.predict import predict as predict
