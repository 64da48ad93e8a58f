"""Distribution policies: where each role of a training loop runs."""

from msrl_jax.policies.base import Codec as Codec
from msrl_jax.policies.base import DistributionPolicy as DistributionPolicy
from msrl_jax.policies.base import Edge as Edge
from msrl_jax.policies.base import Layout as Layout
from msrl_jax.policies.base import Placement as Placement
from msrl_jax.policies.central import Central as Central
from msrl_jax.policies.environments import Environments as Environments
from msrl_jax.policies.gpu_only import GPUOnly as GPUOnly
from msrl_jax.policies.multi_learner import MultiLearner as MultiLearner
from msrl_jax.policies.registry import POLICIES as POLICIES
from msrl_jax.policies.registry import get as get
from msrl_jax.policies.registry import names as names
from msrl_jax.policies.registry import register as register
from msrl_jax.policies.single_learner import SingleLearnerCoarse as SingleLearnerCoarse
from msrl_jax.policies.single_learner import SingleLearnerFine as SingleLearnerFine
