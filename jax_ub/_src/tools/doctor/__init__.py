"""Checks the installation: what is installed and can run here, or why it cannot."""

from jax_ub._src.tools.doctor.examination import examine as examine
from jax_ub._src.tools.doctor.finding import Finding as Finding
from jax_ub._src.tools.doctor.finding import State as State
