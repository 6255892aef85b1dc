from specact.remote.client import Client as Client
from specact.remote.endpoint import Endpoint as Endpoint
from specact.remote.endpoint import tls_context as tls_context
from specact.remote.target import RemoteTarget as RemoteTarget
from specact.remote.target import RemoteVerifier as RemoteVerifier
from specact.remote.target import remote_verifier as remote_verifier
