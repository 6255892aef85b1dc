from specact.server.access import Address as Address
from specact.server.access import Limits as Limits
from specact.server.service import Service as Service
