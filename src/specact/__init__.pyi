from specact import errors as errors
from specact import gates as gates
from specact.errors import SpecactError as SpecactError
from specact.families.chunks.remote import RemotePolicy as RemotePolicy
from specact.families.chunks.remote import connect as connect
from specact.families.chunks.sources import chunk_policy as chunk_policy
from specact.families.codes import sampling as sampling
from specact.gates.calibration import calibrated_gate as calibrated_gate
from specact.load import load_pair as load_pair
from specact.pair import Pair as Pair
from specact.policy import SpeculativePolicy as SpeculativePolicy

__version__: str
