from specact.server.service import Service as Service
from specact.server.settings import Address as Address
from specact.server.settings import Limits as Limits
