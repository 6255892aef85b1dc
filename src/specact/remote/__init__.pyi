from specact.remote.client import Client as Client
from specact.remote.client import ClientSettings as ClientSettings
from specact.remote.target import RemoteTarget as RemoteTarget
from specact.remote.target import RemoteVerifier as RemoteVerifier
from specact.remote.target import remote_verifier as remote_verifier
from specact.remote.transport import Endpoint as Endpoint
from specact.remote.transport import tls_context as tls_context
