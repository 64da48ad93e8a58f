"""Distribution policies: where each role of a training loop runs."""

from msrl_jax.fragments.codecs import Codec as Codec
from msrl_jax.fragments.placement import DistributionPolicy as DistributionPolicy
from msrl_jax.fragments.placement import Edge as Edge
from msrl_jax.fragments.placement import Layout as Layout
from msrl_jax.fragments.placement import Placement as Placement
from msrl_jax.policies.standard import POLICIES as POLICIES
from msrl_jax.policies.standard import Central as Central
from msrl_jax.policies.standard import Environments as Environments
from msrl_jax.policies.standard import GPUOnly as GPUOnly
from msrl_jax.policies.standard import MultiLearner as MultiLearner
from msrl_jax.policies.standard import SingleLearnerCoarse as SingleLearnerCoarse
from msrl_jax.policies.standard import SingleLearnerFine as SingleLearnerFine
from msrl_jax.policies.standard import get as get
from msrl_jax.policies.standard import is_custom as is_custom
from msrl_jax.policies.standard import names as names
from msrl_jax.policies.standard import register as register
