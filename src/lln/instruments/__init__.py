"""Instruments that show how concentrated attention is: temperature, entropy, spectral gap, log-normality.

Maps hold an attention matrix P as what it is made of: `softmax_map`, `lln_map`, `kernel_map`, `dense_map`. Of a map,
for each head: `entropy`, `variance`, `log_moments`, `lognormal_fit`, `spectral_gap`, `principal_std`. Of queries and
keys: `temperature`, `gaussian_fit`. Of a model: `record`.
"""

from lln.instruments.concentration import Estimate, LogMoments, entropy, log_moments, temperature, variance
from lln.instruments.fits import GaussianFit, LognormalFit, QueryKeyFit, gaussian_fit, lognormal_fit
from lln.instruments.maps import AttentionMap, dense_map, kernel_map, lln_map, softmax_map
from lln.instruments.observation import Observation
from lln.instruments.recorder import Recorder, record
from lln.instruments.spectrum import principal_std, spectral_gap

__all__ = [
    "AttentionMap",
    "Estimate",
    "GaussianFit",
    "LogMoments",
    "LognormalFit",
    "Observation",
    "QueryKeyFit",
    "Recorder",
    "dense_map",
    "entropy",
    "gaussian_fit",
    "kernel_map",
    "lln_map",
    "log_moments",
    "lognormal_fit",
    "principal_std",
    "record",
    "softmax_map",
    "spectral_gap",
    "temperature",
    "variance",
]
