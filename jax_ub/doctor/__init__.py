"""The doctor: what is installed, what can run here, and why not."""

from jax_ub.doctor.examination import examine as examine
from jax_ub.doctor.finding import Finding as Finding
from jax_ub.doctor.finding import State as State
