from . import ops as ops
from .functional import cross_entropy
